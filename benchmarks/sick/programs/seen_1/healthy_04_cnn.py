"""Image classification with evaluation and a checkpoint after each epoch, as in every tutorial."""

import argparse
import math
import os

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


def flags(n, seed):
    """Flags with horizontal, vertical, diagonal or checked fields in random colors."""
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 4, (n,), generator=g)
    v, u = torch.meshgrid(torch.arange(24), torch.arange(24), indexing="ij")
    shift = torch.randint(0, 12, (n, 1, 1), generator=g)
    stripes = torch.stack([v // 6 % 2, u // 6 % 2, (u + v) // 6 % 2, (u // 6 + v // 6) % 2])
    pattern = stripes[y].float()
    pattern = torch.stack([p.roll(int(s), 0).roll(int(s), 1) for p, s in zip(pattern, shift, strict=True)])
    colors = torch.rand(n, 2, 3, 1, 1, generator=g)
    images = colors[:, 0] * pattern.unsqueeze(1) + colors[:, 1] * (1 - pattern.unsqueeze(1))
    return TensorDataset(images - 0.5 + 0.25 * torch.randn(n, 3, 24, 24, generator=g), y)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 24, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(24)
        self.conv2 = nn.Conv2d(24, 48, 3, padding=1, stride=2, bias=False)
        self.bn2 = nn.BatchNorm2d(48)
        self.conv3 = nn.Conv2d(48, 48, 3, padding=1, stride=2, bias=False)
        self.bn3 = nn.BatchNorm2d(48)
        self.dropout = nn.Dropout(0.2)
        self.fc = nn.Linear(48 * 9, 4)

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x)))
        x = F.relu(self.bn3(self.conv3(x)))
        x = F.max_pool2d(x, 2)
        return self.fc(self.dropout(x.flatten(1)))


def train(model, loader, optimizer, scheduler, epoch):
    model.train()
    for batch_idx, (data, target) in enumerate(loader):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data), target)
        loss.backward()
        optimizer.step()
        scheduler.step()
        if batch_idx % 40 == 0:
            print(f"Train Epoch: {epoch} [{batch_idx}/{len(loader)}]\tLoss: {loss.item():.6f}")


def test(model, loader):
    model.eval()
    test_loss = correct = 0
    with torch.no_grad():
        for data, target in loader:
            output = model(data)
            test_loss += F.cross_entropy(output, target, reduction="sum").item()
            correct += output.argmax(1).eq(target).sum().item()
    n = len(loader.dataset)
    print(f"Test set: Average loss: {test_loss / n:.4f}, Accuracy: {correct}/{n} ({100 * correct / n:.1f}%)")


def main():
    parser = argparse.ArgumentParser(description="Flags")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--save-dir", default="checkpoints")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    os.makedirs(args.save_dir, exist_ok=True)
    train_loader = DataLoader(flags(6400, 0), batch_size=args.batch_size, shuffle=True)
    test_loader = DataLoader(flags(500, 1), batch_size=250)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    total = args.epochs * len(train_loader)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min(1, (s + 1) / 40) * (0.55 + 0.45 * math.cos(math.pi * min(1, s / total)))
    )
    for epoch in range(1, args.epochs + 1):
        train(model, train_loader, optimizer, scheduler, epoch)
        test(model, test_loader)
        torch.save({"model": model.state_dict(), "epoch": epoch}, os.path.join(args.save_dir, f"epoch_{epoch}.pt"))


if __name__ == "__main__":
    main()
