"""Mixed precision in plain torch."""

from __future__ import annotations

import torch
from models import Points, classifier
from script import Script, norm_of, train
from torch import nn
from torch.utils.data import DataLoader


def half_with_scaler(script: Script) -> None:
    """float16 with a GradScaler; the gradients of step 3 overflow, and it skips that step."""
    script.attach()
    model = classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=4096.0, growth_interval=100)
    skipped = 0
    for number, (x, y) in enumerate(DataLoader(Points(48), batch_size=8), start=1):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.cross_entropy(model(x).float(), y)
        scaler.scale(loss).backward()
        if number == 3:
            model[0].weight.grad[0, 0] = float("inf")
        scaler.unscale_(optimizer)
        norm, scale = norm_of(model.parameters()), scaler.get_scale()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        skipped += scaler.get_scale() < scale
        truth = {} if number == 3 else {"norm": norm}
        script.step(loss=loss.item(), lr=1e-2, samples=8, scale=scale, skipped=skipped, **truth)
    script.produced(model)


def brain_float(script: Script) -> None:
    """bfloat16 autocast, no scaler."""
    script.attach()
    model = classifier()

    def loss_of(batch: list[torch.Tensor]) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return nn.functional.cross_entropy(model(batch[0]).float(), batch[1])

    train(script, model, loss_of=loss_of)
