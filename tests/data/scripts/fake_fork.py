"""Forks a child in the midst of a training on a fake device, while values are on their way; says how the child ended."""

import os
import sys

import torch
from fake_accelerator import load

import perfagent

fakegpu = load()
run = perfagent.attach(record=sys.argv[1])
weight = torch.ones(4, device="fakegpu:0", requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.1)
for step in range(20):
    if step == 10:
        fakegpu.hold()
    weight.square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
child = os.fork()
if not child:
    sys.exit(3)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
fakegpu.let_go()
run.finish()
