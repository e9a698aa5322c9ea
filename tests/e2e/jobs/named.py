"""A job that says of its run what it is told to: `python named.py project=P name=N server=URL ... finished|killed`.
Twenty steps, with time between them for several frames."""

import os
import signal
import sys
import time

import torch

import perfagent

*said, end = sys.argv[1:]
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
perfagent.attach(model, optimizer, **dict(argument.split("=", 1) for argument in said))
for _ in range(20):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).pow(2).mean().backward()
    optimizer.step()
    time.sleep(0.1)
if end == "killed":
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)
