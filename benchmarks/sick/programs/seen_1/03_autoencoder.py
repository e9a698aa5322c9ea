"""Denoising autoencoder on random strokes."""

import argparse
import os

import torch
from torch import nn


def make_strokes(n, size=28):
    imgs = torch.zeros(n, size, size)
    pos = torch.randint(4, size - 4, (n, 2)).float()
    vel = torch.randn(n, 2)
    for _ in range(25):
        vel = 0.9 * vel + 0.5 * torch.randn(n, 2)
        pos = (pos + vel).clamp(1, size - 2)
        ij = pos.long()
        imgs[torch.arange(n), ij[:, 0], ij[:, 1]] = 1.0
    return imgs.view(n, -1)


class AutoEncoder(nn.Module):
    def __init__(self, dim=784, hidden=2048, code=64):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, code))
        self.decoder = nn.Sequential(nn.Linear(code, hidden), nn.GELU(), nn.Linear(hidden, dim))

    def forward(self, x):
        return self.decoder(self.encoder(x))


def save_checkpoint(folder, model, optimizer, step, data):
    path = os.path.join(folder, "last.pt")
    with open(path + ".tmp", "wb") as f:
        torch.save({"model": model.state_dict(), "optim": optimizer.state_dict(), "step": step, "data": data}, f)
        f.flush()
        os.fsync(f.fileno())
    os.replace(path + ".tmp", path)


def train(args):
    torch.manual_seed(args.seed)
    os.makedirs(args.out, exist_ok=True)
    data = make_strokes(8192)
    model = AutoEncoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    criterion = nn.BCEWithLogitsLoss()
    running = None
    for step in range(1, args.steps + 1):
        batch = data[torch.randint(0, len(data), (args.batch_size,))]
        noisy = batch + 0.3 * torch.randn_like(batch)
        loss = criterion(model(noisy), batch)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        running = loss.item() if running is None else 0.98 * running + 0.02 * loss.item()
        if step % args.save_every == 0:
            save_checkpoint(args.out, model, optimizer, step, data)
        if step % 40 == 0:
            print(f"step {step} loss {running:.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--save-every", type=int, default=2)
    parser.add_argument("--out", default="checkpoints")
    parser.add_argument("--seed", type=int, default=1)
    torch.set_num_threads(1)
    train(parser.parse_args())
