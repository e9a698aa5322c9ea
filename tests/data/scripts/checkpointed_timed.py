"""A transformer's feed-forward blocks with activation checkpointing, and an evaluation every ten steps.

Has timers of its own: prints seconds per phase and step as a line of JSON at the end.
"""

import json
import time

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

torch.manual_seed(1)
torch.set_num_threads(1)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.net = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        return x + self.net(self.norm(x))


class Model(nn.Module):
    def __init__(self, vocabulary=100, width=128):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(4))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
timers = []
for step in range(1, 31):
    text = torch.randint(0, 100, (8, 65))
    begin = time.perf_counter()
    logits = model(text[:, :-1])
    loss = functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
    forward = time.perf_counter()
    loss.backward()
    backward = time.perf_counter()
    optimizer.step()
    end = time.perf_counter()
    optimizer.zero_grad()
    if step % 10 == 0:
        model.eval()
        with torch.no_grad():
            for _ in range(3):
                model(torch.randint(0, 100, (8, 64)))
        model.train()
    print(f"step {step}: loss {loss.item()!r}")
    timers.append({"forward": forward - begin, "backward": backward - forward, "optimizer": end - backward})
print("TIMERS", json.dumps(timers))
