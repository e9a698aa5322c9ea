"""VAE in float16 whose exp(logvar) overflows from step 301 on, when a station reports in other units."""

import json
import math
import time

import torch
from torch import nn

BATCH, STEPS, RARE, SIZE, CODE = 64, 450, 300, 96, 12


def truth(**kw):
    print("TRUTH", json.dumps(kw), flush=True)


class Vae(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(SIZE, 224), nn.ReLU(), nn.Linear(224, 224), nn.ReLU(), nn.Linear(224, 2 * CODE)
        )
        self.decoder = nn.Sequential(
            nn.Linear(CODE, 224), nn.ReLU(), nn.Linear(224, 224), nn.ReLU(), nn.Linear(224, SIZE)
        )

    def forward(self, x, generator):
        mean, logvar = self.encoder(x).chunk(2, 1)
        variance = logvar.half().exp()
        kl = 0.5 * (mean.square() + variance - 1 - logvar).sum(1).mean()
        code = mean + variance.sqrt() * torch.randn(mean.shape, generator=generator)
        return self.decoder(code), kl


torch.manual_seed(0)
generator = torch.Generator().manual_seed(35)
basis = torch.randn(6, SIZE, generator=generator) / 6**0.5
model = Vae()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
losses, onset = [], None
for step in range(1, STEPS + 1):
    x = torch.randn(BATCH, 6, generator=generator) @ basis
    if step > RARE:
        x[:4] *= 4000.0  # a station that reports in other units
    with torch.autocast("cpu", dtype=torch.float16):
        again, kl = model(x, generator)
        loss = (again.float() - x).square().sum(1).mean() + kl.float()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.item())
    if onset is None and not math.isfinite(losses[-1]):
        onset = step
        truth(onset=time.time(), step=step, loss=str(losses[-1]), kl=str(kl.item()))
    if step % 25 == 0:
        print(f"step {step} elbo {losses[-1]:.3f} scale {scaler.get_scale():.3g}", flush=True)
truth(
    nonfinite_losses=sum(not math.isfinite(v) for v in losses), before=losses[RARE - 1], last_scale=scaler.get_scale()
)
