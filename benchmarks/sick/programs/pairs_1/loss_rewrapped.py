"""Two losses are added as numbers and put into a new tensor with requires_grad: backward() reaches no weight."""

import json
import time

import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

BATCH, STEPS, SIDE = 144, 900, 24


def truth(**kw):
    print("TRUTH", json.dumps(kw), flush=True)


class Faces(nn.Module):
    """Says of a picture which of eight people it shows, and how far the head is turned."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Conv2d(1, 16, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 32, 3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
        )
        self.person = nn.Linear(32 * (SIDE // 2) ** 2, 8)
        self.angle = nn.Linear(32 * (SIDE // 2) ** 2, 1)

    def forward(self, x):
        h = self.trunk(x)
        return self.person(h), self.angle(h).squeeze(1)


torch.manual_seed(0)
generator = torch.Generator().manual_seed(5)
faces = torch.randn(8, 1, SIDE, SIDE, generator=generator)
model = Faces()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
total = []
truth(onset=time.time(), step=1)
for step in range(1, STEPS + 1):
    who = torch.randint(0, 8, (BATCH,), generator=generator)
    angle = torch.randn(BATCH, generator=generator)
    x = faces[who] + angle[:, None, None, None] * 0.5 + torch.randn(BATCH, 1, SIDE, SIDE, generator=generator)
    person, turned = model(x)
    losses = {"person": cross_entropy(person, who), "angle": mse_loss(turned, angle)}
    loss = torch.tensor(sum(value.item() for value in losses.values()), requires_grad=True)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    total.append(loss.item())
    if step % 30 == 0:
        print(f"[{step}] " + ", ".join(f"{name} {value.item():.3f}" for name, value in losses.items()), flush=True)
truth(
    guessing=2.0794 + 1.0,
    early=sum(total[:50]) / 50,
    late=sum(total[-50:]) / 50,
    with_gradient=sum(p.grad is not None for p in model.parameters()),
)
