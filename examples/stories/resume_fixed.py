"""A training that is preempted at step 300: saved, and resumed in a new process."""

import argparse

import torch
from torch import nn

import perfagent

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--resume", action="store_true")
options = parser.parse_args()

torch.set_num_threads(1)
torch.manual_seed(0)
centers = 0.7 * torch.randn(20, 32)

model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 20))
optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.985)
criterion = nn.CrossEntropyLoss()

first = 1
if options.resume:
    state = torch.load("checkpoint.pt")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    first = 301
perfagent.attach(model, optimizer, start_step=first)

torch.manual_seed(first)  # other batches than in the first part
for step in range(first, first + 300):
    y = torch.randint(0, 20, (64,))
    x = centers[y] + torch.randn(64, 32)
    loss = criterion(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    if step % 100 == 0 or step in (301, 310):
        print(f"step {step} loss {loss.item():.3f} lr {scheduler.get_last_lr()[0]:.5f}", flush=True)

state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
torch.save(state, "checkpoint.pt")
