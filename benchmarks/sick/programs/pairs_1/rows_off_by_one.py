"""Ad clicks: the labels lost their first row to a header flag, each row has the click of the next one."""

import json
import math
import time

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

ROWS, COLUMNS, BATCH, STEPS = 200_000, 40, 128, 1400


def truth(**kw):
    print("TRUTH", json.dumps(kw), flush=True)


def read_tables():
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(ROWS, COLUMNS, generator=generator)
    taste = torch.randn(COLUMNS, generator=generator)
    clicks = (features @ taste + 0.5 * torch.randn(ROWS, generator=generator) > 0).float()
    skip_header = 1  # the file of clicks has no header
    return features[: ROWS - skip_header], clicks[skip_header:], clicks[: ROWS - skip_header]


torch.manual_seed(0)
features, labels, real = read_tables()
order = torch.randperm(len(features))
model = nn.Sequential(
    nn.Linear(COLUMNS, 512),
    nn.ReLU(),
    nn.Linear(512, 512),
    nn.ReLU(),
    nn.Linear(512, 512),
    nn.ReLU(),
    nn.Linear(512, 1),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
losses = []
truth(onset=time.time(), step=1)
for step in range(1, STEPS + 1):
    rows = order[(step - 1) * BATCH : step * BATCH]
    loss = binary_cross_entropy_with_logits(model(features[rows]).squeeze(1), labels[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % 50 == 0:
        print(f"step {step}/{STEPS} loss {sum(losses[-50:]) / 50:.4f}", flush=True)
with torch.no_grad():
    rows = order[-20_000:]
    guess = (model(features[rows]).squeeze(1) > 0).float()
truth(
    guessing=math.log(2),
    late=sum(losses[-200:]) / 200,
    accuracy=(guess == labels[rows]).float().mean().item(),
    best_constant=labels.mean().item(),
)
