"""How far an optimizer's step moves the weights: the norm of the change over the norm of the weights, for each layer.

About 1e-3 is usual; far below, a layer no longer learns, far above, it is being destroyed (SageMaker's WeightUpdateRatio). The
weights before the step must be kept until after it. Not all of them: of every parameter an evenly spaced sample, MOST_NUMBERS
together, so that the memory it takes (2 MiB, during one step) does not grow with the model; a model that is smaller than that
is compared whole. Nothing is written to a weight, and no random number is drawn.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

from perfagent.device import Reading, collect
from perfagent.signals.gradients import Plan
from perfagent.signals.sharding import local

__all__ = ["MOST_NUMBERS", "UpdateRatios", "Weights"]

MOST_NUMBERS = 2**18


class Weights:
    """A sample of the weights before a step, by device and type."""

    __slots__ = ("_before", "_plan", "_strides")

    def __init__(self, parameters: Sequence[Any], plan: Plan, most: int = MOST_NUMBERS) -> None:
        self._plan = plan
        share = _share(plan.sizes, most)
        self._strides = [max(1, -(-size // share)) for size in plan.sizes]
        self._before = self._take(parameters)

    def _take(self, parameters: Sequence[Any]) -> list[tuple[Any, list[int], list[int]]]:
        """(numbers, places of the parameters they are of, how many of each)."""
        torch = sys.modules["torch"]
        groups: dict[tuple[Any, Any], list[tuple[int, Any]]] = {}
        with torch.no_grad():
            for place, parameter in enumerate(parameters):
                weights = local(parameter)
                if (
                    type(weights) not in (torch.Tensor, torch.nn.Parameter)
                    or not weights.is_floating_point()
                    or not weights.numel()
                ):
                    continue  # quantized weights and other kinds of their own
                sample = _flat(weights)[:: self._strides[place]]
                groups.setdefault((weights.device, weights.dtype), []).append((place, sample))
            taken = []
            for same in groups.values():
                numbers = torch.cat([sample for _, sample in same])
                if numbers.dtype in (torch.float16, torch.bfloat16):
                    numbers = numbers.float()  # the difference of two halves is no half
                taken.append((numbers, [place for place, _ in same], [sample.numel() for _, sample in same]))
        return taken

    def compare(self, parameters: Sequence[Any]) -> UpdateRatios | None:
        """What the step changed. None where it cannot be read without waiting, or where the parameters are others now."""
        torch = sys.modules["torch"]
        readings = []
        after = self._take(parameters)
        if [kept[1:] for kept in self._before] != [kept[1:] for kept in after]:
            return None
        with torch.no_grad():
            for (old, places, sizes), (new, _, _) in zip(self._before, after, strict=True):
                weights = torch._foreach_norm(old.split(sizes), 2)
                changes = torch._foreach_norm(new.sub_(old).split(sizes), 2)
                reading = collect(torch.stack((*weights, *changes)))
                if reading is None:
                    return None
                readings.append((reading, places))
        return UpdateRatios(readings, self._strides, self._plan)


def _share(sizes: Sequence[int], most: int) -> int:
    """Numbers that each parameter may have, so that all together have at most `most`; what small ones leave, large ones get."""
    left, waiting = most, sorted(sizes)
    for number, size in enumerate(waiting):
        share = left // (len(waiting) - number)
        if size > share:
            return max(1, share)
        left -= size
    return max(1, waiting[-1] if waiting else 1)


def _flat(weights: Any) -> Any:
    """A view of the weights in one dimension; a copy only of those that lie scattered in memory."""
    if weights.is_contiguous():
        return weights.view(-1)
    dense = weights.permute(*sorted(range(weights.dim()), key=lambda i: -weights.stride(i)))  # channels last, transposed
    return dense.view(-1) if dense.is_contiguous() else weights.reshape(-1)


class UpdateRatios:
    """Norms of weights and changes, perhaps still on the device."""

    __slots__ = ("_plan", "_readings", "_strides")

    def __init__(self, readings: Sequence[tuple[Reading, Sequence[int]]], strides: Sequence[int], plan: Plan) -> None:
        self._readings, self._strides, self._plan = readings, strides, plan

    def ready(self) -> bool:
        return all(reading.ready() for reading, _ in self._readings)

    def rows(self) -> tuple[float | None, dict[str, float]]:
        """The ratio of all weights, and of each layer; absent where all weights are zero. Once, when ready."""
        layers = self._plan.layers
        weights, changes = [0.0] * len(layers.names), [0.0] * len(layers.names)
        for reading, places in self._readings:
            values = reading.values()
            for number, place in enumerate(places):
                row, factor = layers.of[place], self._strides[place]  # each number of a sample stands for so many
                weights[row] += factor * values[number] ** 2
                changes[row] += factor * values[len(places) + number] ** 2
        ratios = {
            name: math.sqrt(change / weight)
            for name, weight, change in zip(layers.names, weights, changes, strict=True)
            if weight != 0.0
        }
        total = sum(weights)
        return (math.sqrt(sum(changes) / total) if total != 0.0 else None), ratios
