"""A classifier with BatchNorm, validated after every 40 steps on a set that is sorted by class."""

import torch
from torch import nn

import perfagent

torch.manual_seed(0)
torch.set_num_threads(1)
centers = torch.randn(10, 32)
sorted_labels = torch.arange(10).repeat_interleave(64)
validation = [(centers[y] + torch.randn(64, 32), y) for y in sorted_labels.split(64)]

model = nn.Sequential(
    nn.Linear(32, 1024),
    nn.BatchNorm1d(1024),
    nn.ReLU(),
    nn.Linear(1024, 1024),
    nn.BatchNorm1d(1024),
    nn.ReLU(),
    nn.Linear(1024, 10),
)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
criterion = nn.CrossEntropyLoss()


@torch.no_grad()
def validate():
    model.eval()
    total = sum(criterion(model(x), y).item() for x, y in validation)
    model.train()
    return total / len(validation)


for step in range(1, 401):
    y = torch.randint(0, 10, (256,))
    x = centers[y] + torch.randn(256, 32)
    loss = criterion(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 40 == 0:
        val_loss = validate()
        perfagent.log({"val/loss": val_loss})
        if step % 200 == 0:
            print(f"step {step} loss {loss.item():.3f} val_loss {val_loss:.3f}", flush=True)
