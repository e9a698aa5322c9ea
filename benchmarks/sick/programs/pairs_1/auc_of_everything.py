"""After each step the AUC of all predictions so far is computed anew: steps get slower, though the model does not."""

import json
import time

import numpy as np
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

BATCH, STEPS, COLUMNS = 640, 700, 30


def truth(**kw):
    print("TRUTH", json.dumps(kw), flush=True)


def auc(scores, labels):
    rank = np.argsort(np.argsort(np.concatenate(scores))) + 1
    y = np.concatenate(labels)
    positive = y.sum()
    return (rank[y > 0].sum() - positive * (positive + 1) / 2) / (positive * (len(y) - positive))


torch.manual_seed(0)
generator = torch.Generator().manual_seed(58)
taste = torch.randn(COLUMNS, generator=generator)
model = nn.Sequential(nn.Linear(COLUMNS, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)
losses, scores, labels, seconds, metric = [], [], [], [], []
truth(onset=time.time(), step=1)
for step in range(1, STEPS + 1):
    begin = time.perf_counter()
    x = torch.randn(BATCH, COLUMNS, generator=generator)
    y = (x @ taste + 2 * torch.randn(BATCH, generator=generator) > 0).float()
    logits = model(x).squeeze(1)
    loss = binary_cross_entropy_with_logits(logits, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scores.append(logits.detach().numpy())
    labels.append(y.numpy())
    start = time.perf_counter()
    area = auc(scores, labels)
    metric.append(time.perf_counter() - start)
    losses.append(loss.item())
    seconds.append(time.perf_counter() - begin)
    if step % 20 == 0:
        print(f"step {step} loss {losses[-1]:.4f} auc so far {area:.4f}", flush=True)
truth(
    step_seconds_early=sum(seconds[10:60]) / 50,
    step_seconds_late=sum(seconds[-50:]) / 50,
    metric_late=sum(metric[-50:]) / 50,
    late=sum(losses[-50:]) / 50,
)
