"""perfagent in a loop of one's own: `python examples/plain_loop.py --steps 200` with `perfagent up` running."""

import argparse

import torch
from torch.utils.data import DataLoader, TensorDataset

import perfagent

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
options = parser.parse_args()

torch.manual_seed(0)
inputs = torch.randn(50_000, 64)
targets = inputs[:, :8].sum(dim=1, keepdim=True).sin()
loader = DataLoader(TensorDataset(inputs, targets), batch_size=64, shuffle=True)

model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

run = perfagent.attach(model, optimizer, project="examples", name="plain loop", config={"lr": 1e-3, "batch_size": 64})

step = 0
while step < options.steps:
    for x, y in loader:
        step += 1
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            run.log({"accuracy": (loss.item() < 0.5) * 1.0})  # anything of your own, beside what is found by itself
        if step == options.steps:
            break
