"""Twelve convolutions begin with a deviation of 0.01, as the five of AlexNet did: nothing of a picture gets through."""

import json
import math
import time

import torch
from torch import nn
from torch.nn.functional import cross_entropy

CLASSES, BATCH, STEPS, SIDE, CHANNELS = 10, 64, 450, 16, 32


def truth(**kw):
    print("TRUTH", json.dumps(kw), flush=True)


def make_net():
    layers, channels = [], 3
    for _ in range(3):
        for _ in range(4):
            layers += [nn.Conv2d(channels, CHANNELS, 3, padding=1), nn.ReLU(inplace=True)]
            channels = CHANNELS
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(CHANNELS * (SIDE // 8) ** 2, CLASSES))


def init_weights(net):
    for module in net.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.normal_(module.weight, 0.0, 0.01)
            nn.init.zeros_(module.bias)


torch.set_num_threads(1)
torch.manual_seed(0)
generator = torch.Generator().manual_seed(302)
signs = torch.randn(CLASSES, 3, SIDE, SIDE, generator=generator)
net = make_net()
init_weights(net)
optimizer = torch.optim.SGD(net.parameters(), lr=0.005, momentum=0.9, weight_decay=5e-4)
losses, hits = [], 0
truth(onset=time.time(), step=1)
for step in range(1, STEPS + 1):
    y = torch.randint(0, CLASSES, (BATCH,), generator=generator)
    logits = net(signs[y] + torch.randn(BATCH, 3, SIDE, SIDE, generator=generator))
    loss = cross_entropy(logits, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    hits += int((logits.argmax(1) == y).sum()) if step > STEPS - 50 else 0
    if step % 20 == 0:
        print(f"step {step} loss {losses[-1]:.4f} lr {optimizer.param_groups[0]['lr']}", flush=True)
truth(
    guessing=math.log(CLASSES),
    late=sum(losses[-50:]) / 50,
    accuracy=hits / 50 / BATCH,
    logits_of_rows_differ_by=logits.detach().std(0).max().item(),
)
