"""val_interval of 10 was meant for epochs, the loop counts steps: validation takes two thirds of the time."""

import json
import time

import torch
from torch import nn
from torch.nn.functional import cross_entropy

BATCH, STEPS, EVERY, CLASSES, SIDE = 32, 400, 10, 10, 16


def truth(**kw):
    print("TRUTH", json.dumps(kw), flush=True)


def shells(n, generator, kinds):
    y = torch.randint(0, CLASSES, (n,), generator=generator)
    return kinds[y] + 2.0 * torch.randn(n, 3, SIDE, SIDE, generator=generator), y


@torch.no_grad()
def validate(model, x, y):
    model.eval()
    logits = torch.cat([model(part) for part in x.split(BATCH)])
    model.train()
    return cross_entropy(logits, y).item(), (logits.argmax(1) == y).float().mean().item()


torch.manual_seed(0)
generator = torch.Generator().manual_seed(55)
kinds = torch.randn(CLASSES, 3, SIDE, SIDE, generator=generator)
validation = shells(2400, generator, kinds)
model = nn.Sequential(
    nn.Conv2d(3, 32, 3, padding=1),
    nn.BatchNorm2d(32),
    nn.ReLU(),
    nn.Conv2d(32, 32, 3, padding=1),
    nn.BatchNorm2d(32),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(4),
    nn.Flatten(),
    nn.Linear(512, CLASSES),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
losses, validating, begin = [], 0.0, time.perf_counter()
truth(onset=time.time(), step=EVERY)
for step in range(1, STEPS + 1):
    x, y = shells(BATCH, generator, kinds)
    loss = cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % EVERY == 0:
        start = time.perf_counter()
        val_loss, accuracy = validate(model, *validation)
        validating += time.perf_counter() - start
        print(f"step {step} loss {losses[-1]:.4f} val_loss {val_loss:.4f} val_acc {accuracy:.3f}", flush=True)
truth(share_validating=validating / (time.perf_counter() - begin), first=losses[0], late=sum(losses[-20:]) / 20)
