"""Diagnosis from 240 patients with 60 measurements, a network of 1.1 million parameters."""

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce

import perfagent

torch.set_num_threads(1)
torch.manual_seed(2)

# data: eight of the measurements mean something, a tenth of the labels is wrong
n, d = 1240, 60
measurements = torch.randn(n, d)
risk = measurements[:, :8].sum(1) + measurements[:, 0] * measurements[:, 1]
diagnosis = (risk > 0).float()
flip = torch.rand(n) < 0.1
diagnosis[flip] = 1 - diagnosis[flip]
train_x, train_y = measurements[:240], diagnosis[:240]
val_x, val_y = measurements[240:], diagnosis[240:]

model = nn.Sequential(
    nn.Linear(d, 1024),
    nn.ReLU(),
    nn.Linear(1024, 1024),
    nn.ReLU(),
    nn.Linear(1024, 1),
)
optimizer = torch.optim.Adam(model.parameters(), lr=2e-4)
perfagent.attach(model, optimizer, config={"lr": 2e-4, "patients": 240})

batch_size = 24
for epoch in range(1, 161):
    model.train()
    perm = torch.randperm(len(train_x))
    epoch_loss = 0.0
    for b in range(0, len(perm), batch_size):
        idx = perm[b : b + batch_size]
        optimizer.zero_grad()
        loss = bce(model(train_x[idx]).squeeze(1), train_y[idx])
        loss.backward()
        optimizer.step()
        epoch_loss += loss.item() * len(idx)
    if epoch % 4 == 0:
        model.eval()
        with torch.no_grad():
            logits = model(val_x).squeeze(1)
            val_loss = bce(logits, val_y).item()
            accuracy = ((logits > 0) == (val_y > 0.5)).float().mean().item()
        perfagent.log({"val_loss": val_loss, "val_accuracy": accuracy})
        print(f"epoch {epoch}: train {epoch_loss / len(train_x):.4f} val {val_loss:.4f} acc {accuracy:.3f}")
