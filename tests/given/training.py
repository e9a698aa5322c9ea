"""A reader's own training: python training.py [SECONDS]."""

import sys
import time

import torch

import perfagent

torch.manual_seed(0)
inputs = torch.randn(256, 512)
targets = inputs[:, :1] + 0.1 * torch.randn(256, 1)
model = torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
perfagent.attach(model, optimizer, name="slow", stoppable=True)
end = time.time() + float(sys.argv[1] if len(sys.argv) > 1 else 2)
while time.time() < end:
    loss = torch.nn.functional.mse_loss(model(inputs), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print("training", flush=True)
