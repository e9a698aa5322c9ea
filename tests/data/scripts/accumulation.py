"""A classifier trained with gradient accumulation over a DataLoader; --divide scales each micro-loss by the count, as
many do."""

import argparse

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

losses, step = [], 0
for number, (x, y) in enumerate(loader, start=1):
    loss = F.cross_entropy(model(x), y)
    losses.append(loss.item())
    if args.divide:
        loss = loss / args.accumulate
    loss.backward()
    if number % args.accumulate == 0:
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        step += 1
        print(f"step {step}: loss {sum(losses) / len(losses)!r}")
        losses.clear()
