"""Distillation: a larger teacher, in evaluation mode and without gradients, says first what the student is to say.

Has timers of its own: prints seconds per phase and step as a line of JSON at the end.
"""

import json
import time

import torch
from torch import nn
from torch.nn import functional

torch.manual_seed(4)
torch.set_num_threads(1)


def network(width):
    layers = (
        nn.Conv2d(3, width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, width, 3, padding=1),
        nn.ReLU(),
    )
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(16 * width, 10))


teacher, student = network(32).eval(), network(16)
optimizer = torch.optim.SGD(student.parameters(), lr=0.05, momentum=0.9)
images, labels = torch.randn(512, 3, 16, 16), torch.randint(0, 10, (512,))
timers = []
for step in range(1, 31):
    chosen = torch.randint(0, len(images), (32,))
    x, y = images[chosen], labels[chosen]
    begin = time.perf_counter()
    with torch.no_grad():
        soft = functional.softmax(teacher(x) / 2.0, dim=1)
    logits = student(x)
    distance = functional.kl_div(functional.log_softmax(logits / 2.0, dim=1), soft, reduction="batchmean")
    loss = functional.cross_entropy(logits, y) + distance
    forward = time.perf_counter()
    optimizer.zero_grad()
    cleared = time.perf_counter()
    loss.backward()
    backward = time.perf_counter()
    optimizer.step()
    end = time.perf_counter()
    print(f"step {step}: loss {loss.item()!r}")
    timers.append({"forward": forward - begin, "backward": backward - cleared, "optimizer": end - backward})
print("TIMERS", json.dumps(timers))
