"""Autocast in bfloat16 on the CPU with gradient clipping, and timers of its own: seconds per phase and step as JSON."""

import argparse
import json
import time

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

timers = []
t0 = time.perf_counter()
for step, (x, y) in enumerate(DataLoader(Waves(), batch_size=16), start=1):
    t1 = time.perf_counter()
    optimizer.zero_grad()
    t2 = time.perf_counter()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(x)
        loss = criterion(out.float().squeeze(1), y)
    t3 = time.perf_counter()
    scaler.scale(loss).backward()
    t4 = time.perf_counter()
    if step == args.overflow_at:
        model[0].weight.grad.fill_(float("inf"))
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    t5 = time.perf_counter()
    scaler.step(optimizer)
    t6 = time.perf_counter()
    scaler.update()
    print(f"step {step}: loss {loss.item()!r} norm {norm.item()!r}")
    timers.append({"data": t1 - t0, "forward": t3 - t2, "backward": t4 - t3, "optimizer": t6 - t5})
    t0 = time.perf_counter()
print("TIMERS", json.dumps(timers))
