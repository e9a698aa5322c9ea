"""A regression, for a minute, that keeps the validation loss of each step to plot it at the end."""

import time

import torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)
held_out = torch.randn(128, 64)

model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
criterion = nn.MSELoss()

step, began, validation_losses = 0, time.monotonic(), []
while time.monotonic() - began < 60:
    x = torch.randn(512, 64)
    loss = criterion(model(x), x[:, :2].sum(dim=1, keepdim=True))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    validation_loss = criterion(model(held_out), held_out[:, :2].sum(dim=1, keepdim=True))
    validation_losses.append(validation_loss.item())
    step += 1
    if step in (50, 100, 150):
        print(f"step {step} validation loss {validation_loss.item():.3f}", flush=True)
