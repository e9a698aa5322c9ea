"""What a loop under test sees: `attach`, which does nothing the first time, and a place to say what each step really
was."""

from __future__ import annotations

import hashlib
import math
import os
import random
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn


@dataclass
class Script:
    """One run of a loop. watched: with the agent. rank, ranks: of the job. folder: for what frameworks want to
    write."""

    attach: Callable[..., Any]
    watched: bool
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
    optimizers: Sequence[torch.optim.Optimizer],
    batches: Collection[Any],
    loss_of: Callable[[Any], torch.Tensor] | None = None,
    *,
    window: int = 1,
    total: Callable[[list[float]], float] = math.fsum,
    clip: float = 0.0,
    after: Callable[[int], object] = lambda number: None,
    **truth: float,
) -> None:
    """A step each `window` batches, and at the end. loss_of: a batch, by default the cross entropy of a class. total: of the
    losses of a window. after: gets the number of each batch. truth: where it is not what these say."""
    losses, samples = [], 0
    for number, batch in enumerate(batches, start=1):
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1]) if loss_of is None else loss_of(batch)
        loss.backward()
        losses.append(loss.item())
        samples += len(batch[0])
        if number % window == 0 or number == len(batches):
            norm, lr = norm_of(model.parameters()), optimizers[0].param_groups[0]["lr"]
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            script.step(**{"loss": total(losses), "lr": lr, "norm": norm, "samples": samples, **truth})
            losses, samples = [], 0
        after(number)
    script.produced(model)


def norm_of(parameters: Iterable[torch.Tensor]) -> float:
    """The global 2-norm of the gradients, by hand."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    return float(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g.double()) for g in gradients])))
