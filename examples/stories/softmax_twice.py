"""A classifier of ten classes, whose last layer is a softmax: its outputs are probabilities."""

import torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)
centers = torch.randn(10, 32) * 2

model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 10), nn.Softmax(dim=1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
criterion = nn.CrossEntropyLoss()

for step in range(1, 1001):
    y = torch.randint(0, 10, (64,))
    x = centers[y] + torch.randn(64, 32)
    loss = criterion(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 250 == 0:
        print(f"step {step} loss {loss.item():.3f}", flush=True)
