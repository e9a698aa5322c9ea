"""The weight decay grows to 6.4 where 0.64 was meant: from step 1000 on the loss creeps up, by a quarter in the end."""

import json
import time

import torch
from torch import nn
from torch.nn.functional import cross_entropy

CLASSES, SIZE, BATCH, STEPS, FROM, LAST_DECAY = 50, 64, 256, 3200, 1000, 6.4


class DecaySchedule:
    """Even steps, from 0.04 to the last value; it begins at step FROM."""

    def __init__(self, optimizer, first, last):
        self.optimizer, self.first, self.last = optimizer, first, last

    def set(self, step):
        part = max(0.0, (step - FROM) / (STEPS - FROM))
        decay = self.first * (1 - part) + self.last * part
        for group in self.optimizer.param_groups:
            group["weight_decay"] = decay
        return decay


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict(
            {"in": nn.Linear(SIZE, 320), "mid": nn.Linear(320, 320), "out": nn.Linear(320, CLASSES)}
        )

    def forward(self, x):
        return self.layers["out"](nn.functional.silu(self.layers["mid"](nn.functional.silu(self.layers["in"](x)))))


torch.manual_seed(0)
generator = torch.Generator().manual_seed(58)
centers = torch.randn(CLASSES, SIZE, generator=generator)
model = Encoder()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
decays, mean = DecaySchedule(optimizer, 0.04, LAST_DECAY), 0.0
for step in range(1, STEPS + 1):
    decay = decays.set(step)
    y = torch.randint(0, CLASSES, (BATCH,), generator=generator)
    loss = cross_entropy(model(centers[y] + 2.6 * torch.randn(BATCH, SIZE, generator=generator)), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    mean += (loss.item() - mean) / min(step, 50)
    if step == FROM:
        print("TRUTH", json.dumps({"onset": time.time(), "step": step, "loss": mean}), flush=True)
    if step % 50 == 0:
        print(f"step {step} loss {mean:.4f} weight_decay {decay:.3f}", flush=True)
