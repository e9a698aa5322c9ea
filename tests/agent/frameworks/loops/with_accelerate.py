"""Accelerate."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from models import Points, classifier
from script import Script, norm_of
from torch import nn
from torch.utils.data import DataLoader


def accumulate(script: Script) -> None:
    """accelerator.accumulate over two micro-batches, clipping at the boundary."""
    script.attach()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Points(96), batch_size=8))
    losses: list[float] = []
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(x), y)
            losses.append(loss.item())
            accelerator.backward(loss)
            norm = norm_of(model.parameters())
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            script.step(loss=sum(losses) / 2, lr=1e-2, norm=norm, samples=16)
            losses.clear()
    script.produced(model)
