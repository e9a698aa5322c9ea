"""Lightning, under both of its names."""

from __future__ import annotations

import math
from typing import Any

import lightning.pytorch
import pytorch_lightning
import torch
from models import Points, classifier
from script import Script, norm_of
from torch import nn
from torch.utils.data import DataLoader
from trainers import lightning_trainer


def automatic(script: Script, accumulate: str = "1", clip: str = "") -> None:
    """Automatic optimization, validation in between: the optimizer is given a closure that trains on the last
    micro-batch."""
    _fit(script, lightning.pytorch, manual=False, accumulate=int(accumulate), clip=float(clip or 0))


def manual(script: Script) -> None:
    """Manual optimization: training_step returns nothing, two micro-batches a step. Under the package's older name."""
    _fit(script, pytorch_lightning, manual=True, accumulate=2)


def _fit(script: Script, pl: Any, *, manual: bool, accumulate: int, clip: float = 0.0) -> None:
    script.attach()
    sums: list[float] = []

    class Task(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = classifier()
            self.automatic_optimization = not manual

        def training_step(self, batch: Any, index: int) -> Any:
            loss = nn.functional.cross_entropy(self.model(batch[0]), batch[1])
            sums.append(loss.item() / accumulate)
            if not manual:
                return loss
            optimizer = self.optimizers()
            self.manual_backward(loss / accumulate)
            if len(sums) == accumulate:
                self._truth()
                optimizer.step()
                optimizer.zero_grad()
            return None

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            if not manual:
                self._truth()

        def _truth(self) -> None:
            script.step(loss=math.fsum(sums), lr=1e-2, norm=norm_of(self.parameters()), samples=8 * len(sums))
            sums.clear()

        def validation_step(self, batch: Any, index: int) -> None:
            self.model(batch[0])

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    task = Task()
    trainer = lightning_trainer(
        pl.__name__, max_epochs=1, val_check_interval=0.5, accumulate_grad_batches=1 if manual else accumulate,
        gradient_clip_val=clip or None,
    )  # fmt: skip
    loader = DataLoader(Points(48 * accumulate), batch_size=8)
    trainer.fit(task, loader, DataLoader(Points(16), batch_size=8))
    script.produced(task)
