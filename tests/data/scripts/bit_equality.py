"""Trains a small model with dropout, convolution and batch norm and prints one hash of all that training produced."""

import hashlib
import random
import sys

import torch
from torch import nn

torch.manual_seed(5)
random.seed(5)
torch.set_num_threads(int(sys.argv[1]))

if len(sys.argv) > 2:  # --attach: the one line that makes the difference
    import perfagent

    run = perfagent.attach()
    if "everything" in sys.argv[2]:  # gradients, updates and dead units in every step
        from perfagent.step.governor import Governor

        run._progress.links.governor = Governor(1e9)
        run._progress.links.gradient_schedule.deeper = 1

model = nn.Sequential(
    nn.Conv1d(2, 16, 3, padding=1), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Flatten(), nn.Linear(16 * 32, 64),
    nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 5),
)  # fmt: skip
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
digest = hashlib.sha256()
for _ in range(40):
    x = torch.randn(24, 2, 32) * random.random()
    loss = nn.functional.cross_entropy(model(x), torch.randint(0, 5, (24,)))
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if "media" in sys.argv[-1]:
        seen = (
            perfagent.Image(x[0].detach().clamp(0, 1)),
            perfagent.Histogram(model[0].weight),
            perfagent.Table(["a"], [[1]]),
        )
        run.log(dict(zip(("samples", "weights", "table"), seen, strict=True)))
    digest.update(repr(loss.item()).encode())
for tensor in [*model.state_dict().values(), torch.get_rng_state()]:
    digest.update(tensor.numpy().tobytes())
digest.update(repr(random.getstate()).encode())
print(digest.hexdigest())
