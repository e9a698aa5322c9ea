"""What a loop under test sees: `attach`, which does nothing the first time, and a place to say what each step really
was."""

from __future__ import annotations

import functools
import hashlib
import math
import os
import random
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from models import Points
from torch import nn
from torch.utils.data import DataLoader


@dataclass
class Script:
    """One run of a loop. rank, ranks: of the job. folder: for what frameworks want to write."""

    attach: Callable[..., Any]
    folder: str
    steps: list[dict[str, float]] = field(default_factory=list)
    rank: int = int(os.environ.get("RANK", "0"))
    ranks: int = int(os.environ.get("WORLD_SIZE", "1"))
    _digest: Any = field(default_factory=hashlib.sha256)

    def seed(self) -> None:
        torch.manual_seed(1234)
        random.seed(1234)

    def step(self, **truth: float) -> None:
        """loss, lr, norm, samples, tokens, scale, skipped: what of them this loop knows of the step just made."""
        self.steps.append({name: float(value) for name, value in truth.items()})

    def produced(self, *models: nn.Module) -> None:
        """The end of a loop: every weight, and the random states, as they are now."""
        for model in models:
            for tensor in model.state_dict().values():
                if isinstance(tensor, torch.Tensor):
                    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
                    self._digest.update(whole.detach().float().numpy().tobytes())
        self._digest.update(torch.get_rng_state().numpy().tobytes())
        self._digest.update(repr(random.getstate()).encode())

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()


def train(
    script: Script,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer] = (),
    batches: Collection[Any] = (),
    loss_of: Callable[[Any], torch.Tensor] | None = None,
    *,
    window: int = 1,
    total: Callable[[list[float]], float] = math.fsum,
    between: Callable[[], object] = lambda: None,
    clip: float = 0.0,
    clipped: Callable[[float], object] | None = None,
    shards: bool = False,
    after: Callable[[int], object] = lambda number: None,
    **truth: float,
) -> None:
    """A step each `window` batches, and at the end. optimizers: AdamW, if none is given; batches: six of eight points. loss_of:
    a batch, by default the cross entropy of a class. total: of the losses of a window. between: comes after the backward
    pass. clipped: how, if not by torch's function. shards: plain gradients are parts. after: gets the number of each batch.
    truth: where it is not what these say."""
    optimizers = optimizers or [torch.optim.AdamW(model.parameters(), lr=1e-2)]
    batches = batches if len(batches) else DataLoader(Points(48), batch_size=8)
    losses, samples = [], 0
    for number, batch in enumerate(batches, start=1):
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1]) if loss_of is None else loss_of(batch)
        loss.backward()
        losses.append(loss.item())
        samples += len(batch[0])
        if number % window == 0 or number == len(batches):
            between()
            norm, lr = norm_of(model.parameters(), shards=shards), optimizers[0].param_groups[0]["lr"]
            if clip:
                (clipped or functools.partial(nn.utils.clip_grad_norm_, model.parameters()))(clip)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            script.step(**{"loss": total(losses), "lr": lr, "norm": norm, "samples": samples, **truth})
            losses, samples = [], 0
        after(number)
    script.produced(model)


def norm_of(parameters: Iterable[torch.Tensor], *, shards: bool = False) -> float:
    """The global 2-norm of the gradients, by hand; shards: of their parts on all ranks."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    whole = [g.full_tensor() if hasattr(g, "full_tensor") else g for g in gradients]
    square = torch.stack([one.double().square().sum() for one in whole]).sum()
    if shards:
        torch.distributed.all_reduce(square)
    return float(square.sqrt())
