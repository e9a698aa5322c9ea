"""A small vision transformer with autocast to bfloat16, gradient accumulation and warm-up."""

import argparse

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


def get_args():
    p = argparse.ArgumentParser()
    p.add_argument("--lr", type=float, default=3e-1)
    p.add_argument("--warmup-steps", type=int, default=120)
    p.add_argument("--epochs", type=int, default=5)
    p.add_argument("--batch-size", type=int, default=32)
    p.add_argument("--accum", type=int, default=2)
    return p.parse_args()


def gratings(n, classes=8, size=16):
    """Stripes in eight directions, under noise."""
    y = torch.randint(0, classes, (n,))
    angle = y.float() * torch.pi / classes + 0.05 * torch.randn(n)
    v, u = torch.meshgrid(torch.arange(size).float(), torch.arange(size).float(), indexing="ij")
    phase = torch.rand(n, 1, 1) * 6.28
    waves = torch.sin(0.9 * (angle.cos().view(-1, 1, 1) * u + angle.sin().view(-1, 1, 1) * v) + phase)
    return waves.unsqueeze(1) + 0.5 * torch.randn(n, 1, size, size), y


class ViT(nn.Module):
    def __init__(self, classes=8, dim=64, depth=3, heads=4, patch=4, size=16):
        super().__init__()
        self.patchify = nn.Conv2d(1, dim, patch, stride=patch)
        self.cls = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos = nn.Parameter(0.02 * torch.randn(1, (size // patch) ** 2 + 1, dim))
        layer = nn.TransformerEncoderLayer(dim, heads, dim * 4, 0.0, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, depth, norm=nn.LayerNorm(dim), enable_nested_tensor=False)
        self.head = nn.Linear(dim, classes)

    def forward(self, x):
        x = self.patchify(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.pos
        return self.head(self.blocks(x)[:, 0])


def main():
    args = get_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    loader = DataLoader(TensorDataset(*gratings(6400)), batch_size=args.batch_size, shuffle=True, drop_last=True)
    model = ViT()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1e-3, 1.0, total_iters=args.warmup_steps)
    criterion = nn.CrossEntropyLoss()
    update = 0
    for epoch in range(args.epochs):
        for i, (x, y) in enumerate(loader):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = criterion(model(x), y) / args.accum
            loss.backward()
            if (i + 1) % args.accum == 0:
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                update += 1
                if update % 25 == 0:
                    lr = scheduler.get_last_lr()[0]
                    print(f"epoch {epoch} update {update} loss {loss.item() * args.accum:.3f} lr {lr:.2e}")


if __name__ == "__main__":
    main()
