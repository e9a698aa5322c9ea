"""Healthy: the last layer of each residual block begins at zero, so the net begins as a shallow one, and learns."""

import json
import math

import torch
from torch import nn
from torch.nn.functional import cross_entropy, relu

CLASSES, BATCH, STEPS, SIZE, WIDTH, BLOCKS = 12, 128, 1200, 48, 256, 6


def truth(**kw):
    print("TRUTH", json.dumps(kw), flush=True)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.fc1 = nn.Linear(WIDTH, 2 * WIDTH)
        self.fc2 = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.fc2(relu(self.fc1(self.norm(x))))


class ResidualNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(SIZE, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.start_as_identity()

    def start_as_identity(self):
        """Each block begins as the identity, so that a deep net is as easy to train as a shallow one."""
        for block in self.blocks:
            nn.init.zeros_(block.fc2.weight)
            nn.init.zeros_(block.fc2.bias)

    def forward(self, x):
        return self.head(self.norm(self.blocks(self.stem(x))))


torch.set_num_threads(1)
torch.manual_seed(0)
generator = torch.Generator().manual_seed(301)
kinds = torch.randn(CLASSES, SIZE, generator=generator)
model = ResidualNet()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
losses, hits = [], 0
for step in range(1, STEPS + 1):
    y = torch.randint(0, CLASSES, (BATCH,), generator=generator)
    logits = model(kinds[y] + 1.5 * torch.randn(BATCH, SIZE, generator=generator))
    loss = cross_entropy(logits, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    hits += int((logits.argmax(1) == y).sum()) if step > STEPS - 100 else 0
    if step % 25 == 0:
        print(f"step {step} loss {losses[-1]:.4f}", flush=True)
truth(
    healthy=True,
    guessing=math.log(CLASSES),
    late=sum(losses[-100:]) / 100,
    accuracy=hits / 100 / BATCH,
    weights_that_are_zero=sum(not bool(p.any()) for p in model.parameters() if p.dim() == 2),
)
