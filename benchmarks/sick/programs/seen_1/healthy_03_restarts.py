"""Forest cover from tabular data: small batches, noisy labels, SGD with warm restarts."""

import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts
from torch.utils.data import DataLoader, TensorDataset, random_split


def cover_data(n=24_000):
    x = torch.randn(n, 54)
    teacher = nn.Sequential(nn.Linear(54, 32), nn.Tanh(), nn.Linear(32, 7))
    with torch.no_grad():
        for p in teacher.parameters():
            p.mul_(3)
        logits = teacher(x)
    y = torch.distributions.Categorical(logits=logits).sample()  # labels are noisy, as a forest is
    return TensorDataset(x, y)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(54, 128),
            nn.BatchNorm1d(128),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Linear(128, 128),
            nn.BatchNorm1d(128),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Linear(128, 7),
        )

    def forward(self, x):
        return self.layers(x)


def evaluate(model, loader):
    model.eval()
    loss = hits = n = 0
    with torch.inference_mode():
        for x, y in loader:
            out = model(x)
            loss += nn.functional.cross_entropy(out, y, reduction="sum").item()
            hits += (out.argmax(1) == y).sum().item()
            n += len(y)
    model.train()
    return loss / n, hits / n


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(21)
    train_set, val_set = random_split(cover_data(), [22_000, 2_000])
    train_loader = DataLoader(train_set, batch_size=32, shuffle=True, drop_last=True)
    val_loader = DataLoader(val_set, batch_size=500)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4, nesterov=True)
    scheduler = CosineAnnealingWarmRestarts(optimizer, T_0=3, T_mult=2, eta_min=1e-4)
    for epoch in range(9):
        for i, (x, y) in enumerate(train_loader):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            scheduler.step(epoch + i / len(train_loader))
        val_loss, val_acc = evaluate(model, val_loader)
        print(f"epoch {epoch}: train {loss.item():.3f} val {val_loss:.3f} acc {val_acc:.3f}")
