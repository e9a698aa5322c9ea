"""Autocast in bfloat16 on the CPU with gradient clipping; --scaler adds a GradScaler with a scale that has to come down
first."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--scaler", action="store_true")
parser.add_argument("--overflow-at", type=int, default=0, help="the step whose gradients overflow")
args = parser.parse_args()

torch.manual_seed(11)


class Waves(Dataset):
    def __len__(self):
        return args.steps * 16

    def __getitem__(self, index):
        t = torch.linspace(0, 6.28, 128) * (1 + index % 7)
        return torch.sin(t)[None], torch.tensor(float(index % 7))


model = nn.Sequential(
    nn.Conv1d(1, 32, 5, padding=2), nn.BatchNorm1d(32), nn.ReLU(), nn.Conv1d(32, 32, 5, padding=2), nn.ReLU(),
    nn.Flatten(), nn.Linear(32 * 128, 64), nn.Tanh(), nn.Linear(64, 1),
)  # fmt: skip
criterion = nn.MSELoss()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000, enabled=args.scaler)

for step, (x, y) in enumerate(DataLoader(Waves(), batch_size=16), start=1):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(x)
        loss = criterion(out.float().squeeze(1), y)
    scaler.scale(loss).backward()
    if step == args.overflow_at:
        model[0].weight.grad.fill_(float("inf"))
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    print(f"step {step}: loss {loss.item()!r} norm {norm.item()!r}")
