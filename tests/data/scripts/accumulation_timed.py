"""A classifier with gradient accumulation over a DataLoader, and timers of its own: seconds per phase and step as JSON."""

import argparse
import json
import time

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--accumulate", type=int, default=4)
parser.add_argument("--divide", action="store_true")
args = parser.parse_args()

torch.manual_seed(7)
inputs = torch.randn(args.steps * args.accumulate * 32, 256)
labels = (inputs[:, :10].argmax(dim=1) + torch.randint(0, 2, (len(inputs),))) % 10
loader = DataLoader(TensorDataset(inputs, labels), batch_size=32, shuffle=True)
model = nn.Sequential(
    nn.Linear(256, 512), nn.ReLU(), nn.Dropout(0.2), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.7)


def zeros():
    return {"data": 0.0, "forward": 0.0, "backward": 0.0, "optimizer": 0.0}


losses, step, timers, spent = [], 0, [], zeros()
t0 = time.perf_counter()
for number, (x, y) in enumerate(loader, start=1):
    t1 = time.perf_counter()
    loss = F.cross_entropy(model(x), y)
    t2 = time.perf_counter()
    losses.append(loss.item())
    if args.divide:
        loss = loss / args.accumulate
    t3 = time.perf_counter()
    loss.backward()
    t4 = time.perf_counter()
    spent["data"] += t1 - t0
    spent["forward"] += t2 - t1
    spent["backward"] += t4 - t3
    if number % args.accumulate == 0:
        t5 = time.perf_counter()
        optimizer.step()
        spent["optimizer"] += time.perf_counter() - t5
        timers.append(spent)
        spent = zeros()
        scheduler.step()
        optimizer.zero_grad()
        step += 1
        print(f"step {step}: loss {sum(losses) / len(losses)!r}")
        losses.clear()
    t0 = time.perf_counter()
print("TIMERS", json.dumps(timers))
