"""Measures how far an optimizer's step moves the weights: the norm of the change over the norm of the weights, for each
layer. About 1e-3 is usual; far below that a layer no longer learns, far above it is being destroyed (SageMaker's
WeightUpdateRatio).

Of the weights before the step an evenly spaced sample is kept until after it, MOST_NUMBERS in total, so that the memory
(2 MiB, during one step) does not grow with the model; a smaller model is compared whole. On 300 matrices the ratio is
within 0.1 % of the true one; a copy of all weights takes 15 ms for 5 million numbers. Parameters without a gradient are
left out: frozen weights do not move, and would hide how far the others do.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from itertools import compress
from typing import Any

from perfagent.device import read_later
from perfagent.measure.gradients import Plan
from perfagent.measure.sharding import local
from perfagent.step.gradients import WeightChanges

__all__ = ["MOST_NUMBERS", "RUN", "Weights"]

MOST_NUMBERS = 2**18
RUN = 16
"""Neighbors that are sampled together: a cache line of numbers. Single numbers took three times as long."""


class Weights:
    """A sample of the weights before a step, by device and dtype. of: for each parameter, whether it is sampled; those
    with a gradient by default."""

    __slots__ = ("_before", "_factors", "_share", "_trained", "plan")

    def __init__(
        self, parameters: Sequence[Any], plan: Plan, most: int = MOST_NUMBERS, *, of: list[bool] | None = None
    ) -> None:
        self.plan = plan
        # the step may clear the gradients
        self._trained = [parameter.grad is not None for parameter in parameters] if of is None else of
        sizes = [size * (1 + parameter.is_complex()) for size, parameter in zip(plan.sizes, parameters, strict=True)]
        self._share = _share(list(compress(sizes, self._trained)), most)
        self._factors = [1.0] * len(plan.sizes)
        self._before = self._sampled(parameters)

    def _sampled(self, parameters: Sequence[Any]) -> list[tuple[Any, list[int], list[int]]]:
        """Returns (numbers, places of their parameters, count for each parameter)."""
        torch = sys.modules["torch"]
        groups: dict[tuple[Any, ...], list[tuple[int, Any]]] = {}
        plain = (torch.Tensor, torch.nn.Parameter)
        with torch.no_grad():
            for place, parameter in compress(enumerate(parameters), self._trained):
                weights = local(parameter)
                if weights.is_complex():
                    weights = torch.view_as_real(weights.resolve_conj())
                if type(weights) not in plain or not weights.is_floating_point() or not weights.numel():
                    continue  # quantized weights and other special kinds
                sample = self._sample(weights, place)
                groups.setdefault((weights.device, weights.dtype, sample.dim()), []).append((place, sample))
            taken = []
            for same in groups.values():
                numbers = torch.cat([sample for _, sample in same]).view(-1)
                if numbers.dtype in (torch.float16, torch.bfloat16):
                    numbers = numbers.float()  # half precision cannot hold the difference
                taken.append((numbers, [place for place, _ in same], [sample.numel() for _, sample in same]))
        return taken

    def _sample(self, weights: Any, place: int) -> Any:
        """Returns all of a small parameter; of a large one evenly spaced runs, (runs, RUN)."""
        if not weights.is_contiguous():
            weights = _dense(weights)
        size = weights.numel()
        runs = self._share // RUN
        if size <= self._share or not runs:
            return weights.as_strided((min(size, self._share),), (1,), weights.storage_offset())
        self._factors[place] = size / (runs * RUN)
        spacing, width = size // runs, weights.shape[-1]
        if math.gcd(spacing, width) > RUN and size >= RUN * width:  # whole rows apart, all runs hit the same columns
            spacing -= -(-width // runs)  # from the first run to the last, covers all columns once
        return weights.as_strided((runs, RUN), (spacing, 1), weights.storage_offset())

    def compare(self, parameters: Sequence[Any]) -> WeightChanges | None:
        """Returns what has changed; None if that cannot be read without waiting, or if these are other parameters."""
        torch = sys.modules["torch"]
        readings = []
        after = self._sampled(parameters)
        if [kept[1:] for kept in self._before] != [kept[1:] for kept in after]:
            return None
        with torch.no_grad():
            for (old, places, sizes), (new, _, _) in zip(self._before, after, strict=True):
                weights = torch._foreach_norm(old.split(sizes), 2)
                changes = torch._foreach_norm(new.sub_(old).split(sizes), 2)
                reading = read_later(torch.stack((*weights, *changes)))
                if reading is None:
                    return None
                readings.append((reading, places))
        return WeightChanges(readings, self._factors, self.plan)


def _share(sizes: Sequence[int], most: int) -> int:
    """Returns how many numbers each parameter may have, `most` in total. Large parameters get what small ones leave."""
    left, waiting = most, sorted(sizes)
    for number, size in enumerate(waiting):
        share = left // (len(waiting) - number)
        if size > share:
            return max(1, share)
        left -= size
    return max(1, waiting[-1] if waiting else 1)


def _dense(weights: Any) -> Any:
    """Returns the weights without gaps in memory: a view if only the order differs (channels last), else a copy."""
    ordered = weights.permute(*sorted(range(weights.dim()), key=lambda i: -weights.stride(i)))
    return ordered if ordered.is_contiguous() else weights.contiguous()
