"""What a training itself can say of its steps, to compare with what was recorded."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

__all__ = ["norm_of"]


def norm_of(parameters: Iterable[torch.Tensor]) -> float:
    """The 2-norm of all gradients together."""
    return math.sqrt(sum(float(p.grad.double().square().sum()) for p in parameters if p.grad is not None))
