"""A classifier of sensor windows: does the signal rise? Each window is scaled by its own mean and deviation."""

import torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)
signals = torch.randn(9600, 32).cumsum(dim=1)
signals[5003] = 21.5  # this sensor was unplugged: it repeats its last value
rises = (signals[:, -1:] > signals[:, :1]).float()


def scaled(windows):
    return (windows - windows.mean(dim=1, keepdim=True)) / windows.std(dim=1, keepdim=True)


model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
criterion = nn.BCEWithLogitsLoss()

for step, (windows, y) in enumerate(zip(signals.split(32), rises.split(32), strict=True), start=1):
    x = scaled(windows)
    loss = criterion(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 100 == 0:
        print(f"step {step} loss {loss.item():.3f}", flush=True)
