"""Fine-tuning: what to train is found by 'fc', which is only the norm before the new head, called 'classifier'."""

import json
import math
import time

import torch
from torch import nn
from torch.nn.functional import cross_entropy

CLASSES, BATCH, STEPS, INPUT = 20, 96, 700, 128


def truth(**kw):
    print("TRUTH", json.dumps(kw), flush=True)


class Net(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Linear(INPUT, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 32)
        )
        self.fc_norm = nn.LayerNorm(32, bias=True)
        self.classifier = nn.Linear(32, classes)

    def forward(self, x):
        return self.classifier(self.fc_norm(self.backbone(x)))


def train(model, parameters, steps, prototypes, generator):
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    losses, hits = [], 0
    for step in range(1, steps + 1):
        y = torch.randint(0, len(prototypes), (BATCH,), generator=generator)
        logits = model(prototypes[y] + torch.randn(BATCH, INPUT, generator=generator))
        loss = cross_entropy(logits, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        hits += int((logits.argmax(1) == y).sum()) if step > steps - 50 else 0
        if step % 50 == 0:
            print(f"step {step} loss {losses[-1]:.4f}", flush=True)
    return sum(losses[-50:]) / 50, hits / 50 / BATCH


torch.manual_seed(0)
generator = torch.Generator().manual_seed(13)
prototypes = torch.randn(CLASSES, INPUT, generator=generator)
model = Net(CLASSES)
for name, p in model.named_parameters():
    p.requires_grad_("fc" in name)
truth(onset=time.time(), step=1, trained=[n for n, p in model.named_parameters() if p.requires_grad])
late, accuracy = train(model, [p for p in model.parameters() if p.requires_grad], 2 * STEPS, prototypes, generator)
with torch.no_grad():  # how good a trained head on the same random backbone would be, in closed form
    y = torch.randint(0, CLASSES, (6000,), generator=generator)
    h = model.fc_norm(model.backbone(prototypes[y] + torch.randn(6000, INPUT, generator=generator)))
    h = torch.cat([h, torch.ones(6000, 1)], 1)
    head = torch.linalg.lstsq(h[:5000], nn.functional.one_hot(y[:5000], CLASSES).float()).solution
    possible = ((h[5000:] @ head).argmax(1) == y[5000:]).float().mean().item()
truth(guessing=math.log(CLASSES), late=late, accuracy=accuracy, accuracy_of_trained_head=possible)
