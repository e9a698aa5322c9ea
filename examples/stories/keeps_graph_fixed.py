"""A recurrent state, carried from step to step."""

import time

import torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)
mixing = torch.randn(128, 16) / 11

encoder = nn.Sequential(nn.Linear(128, 128), nn.Tanh())
head = nn.Linear(128, 16)
optimizer = torch.optim.SGD([*encoder.parameters(), *head.parameters()], lr=1e-2)
criterion = nn.MSELoss()

state, began = torch.zeros(64, 128), time.perf_counter()
for step in range(1, 251):
    x = torch.randn(64, 128)
    state = 0.5 * state.detach() + encoder(x)
    loss = criterion(head(state), x @ mixing)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 0:
        print(
            f"step {step} loss {loss.item():.3f}, {50 / (time.perf_counter() - began):.0f} steps per second", flush=True
        )
        began = time.perf_counter()
