"""Trains until PERFAGENT_TEST_FOLDER/go is there, then makes its loss NaN in module 1 and ends: `busy.py`."""

import os
import time
from pathlib import Path

import torch

import perfagent

torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Linear(32, 32), torch.nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
perfagent.attach(model, optimizer, name="busy")
go = Path(os.environ["PERFAGENT_TEST_FOLDER"]) / "go"


def step() -> None:
    optimizer.zero_grad()
    model(torch.randn(8, 16)).square().mean().backward()
    optimizer.step()
    time.sleep(0.005)


while not go.exists():
    step()
with torch.no_grad():
    model[1].weight[3, 4] = float("nan")
for _ in range(10):
    step()
