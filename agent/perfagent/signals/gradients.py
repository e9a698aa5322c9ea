"""Global gradient norm and the number of parameters whose gradient holds NaN or Inf, from one pass over the gradients.

One `torch._foreach_norm` reads every gradient once (2 launches where a loop over parameters needs 1,500); a 2-norm that is not
finite *is* the check for NaN and Inf. Per-parameter norms stay on the device until the sender's thread reads them. No
collective is issued: for sharded parameters the square sum of the local shards is sent.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from perfagent.device import Reading, collect

if TYPE_CHECKING:
    import torch

__all__ = ["GradientNorms", "gradients_of", "norms"]


class GradientNorms:
    """Norms of one pass, perhaps still on the device. sharded: they are of local shards, and other ranks hold the rest."""

    __slots__ = ("_readings", "count", "sharded")

    def __init__(self, readings: Sequence[Reading], count: int, sharded: bool) -> None:
        self._readings, self.count, self.sharded = readings, count, sharded

    def ready(self) -> bool:
        return all(reading.ready() for reading in self._readings)

    def result(self) -> tuple[float, int]:
        """Global 2-norm and count of non-finite tensors; once, when ready."""
        each = [value for reading in self._readings for value in reading.values()]
        return math.sqrt(math.fsum(value * value for value in each)), sum(not math.isfinite(value) for value in each)


def gradients_of(optimizer: Any) -> list[torch.Tensor]:
    """The gradients an optimizer is about to use."""
    return [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def norms(gradients: Iterable[torch.Tensor]) -> GradientNorms | None:
    """One pass over the gradients; None when there are none, or when they cannot be read without waiting."""
    torch = sys.modules["torch"]
    plain, sharded = [], False
    for gradient in gradients:
        if type(gradient) is not torch.Tensor:
            local = getattr(gradient, "_local_tensor", None)  # FSDP2 and tensor parallel: this rank's shard
            if local is not None:
                sharded = True
                gradient = local  # noqa: PLW2901
        if gradient.layout is not torch.strided:
            gradient = gradient.coalesce().values()  # noqa: PLW2901 - duplicates of a sparse gradient count together
        plain.append(gradient)
    if not plain:
        return None
    readings = []
    with torch.no_grad():
        for group in _alike(plain):
            # a norm in half precision would overflow at 65504 and round to 8 bits
            half = group[0].dtype in (torch.float16, torch.bfloat16)
            each = torch._foreach_norm(group, 2, dtype=torch.float32) if half else torch._foreach_norm(group, 2)
            reading = collect(torch.stack(each))
            if reading is None:
                return None
            readings.append(reading)
    return GradientNorms(readings, len(plain), sharded)


def _alike(tensors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Tensors by device and type, as the fast path of the foreach kernels wants them."""
    groups: dict[tuple[Any, Any], list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return list(groups.values())
