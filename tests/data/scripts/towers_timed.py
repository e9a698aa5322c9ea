"""Contrastive training of two networks that are no parts of one model: texts are encoded first, then pictures.

Has timers of its own: prints seconds per phase and step as a line of JSON at the end.
"""

import json
import time

import torch
from torch import nn
from torch.nn import functional

torch.manual_seed(5)
torch.set_num_threads(1)
texts = nn.Sequential(nn.Embedding(1000, 64), nn.Flatten(), nn.Linear(16 * 64, 256), nn.GELU(), nn.Linear(256, 64))
pictures = nn.Sequential(nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 64))
optimizer = torch.optim.AdamW([*texts.parameters(), *pictures.parameters()], lr=1e-3)
words, pixels = torch.randint(0, 1000, (2000, 16)), torch.randn(2000, 1024)
timers = []
for step in range(1, 31):
    chosen = torch.randint(0, len(words), (128,))
    w, x = words[chosen], pixels[chosen]
    begin = time.perf_counter()
    a = functional.normalize(texts(w), dim=1)
    b = functional.normalize(pictures(x), dim=1)
    loss = functional.cross_entropy(a @ b.T / 0.07, torch.arange(len(a)))
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
