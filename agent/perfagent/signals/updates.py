"""How far an optimizer's step moves the weights: the norm of the change over the norm of the weights, for each layer.

About 1e-3 is usual; far below, a layer no longer learns, far above, it is being destroyed (SageMaker's WeightUpdateRatio). The
weights before the step must be kept until after it. Not all of them: of every parameter an evenly spaced sample, MOST_NUMBERS
together, so that the memory it takes (2 MiB, during one step) does not grow with the model; a model that is smaller than that
is compared whole. What has no gradient in this step is left out: frozen weights stand still, and would hide how far the others
move. Nothing is written to a weight, and no random number is drawn. Several optimizers that step on one backward pass are
compared each round its own step, and told together.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from itertools import compress
from typing import Any

from perfagent.device import Reading, collect
from perfagent.signals.gradients import Plan, joint_plan
from perfagent.signals.sharding import local

__all__ = ["MOST_NUMBERS", "RUN", "UpdateRatios", "Weights", "joint_ratios"]

MOST_NUMBERS = 2**18
RUN = 16
"""Neighbors that are taken together: a cache line of numbers. One by one, evenly spaced, took three times as long."""


class Weights:
    """A sample of the weights before a step, by device and type."""

    __slots__ = ("_before", "_factors", "_plan", "_share", "_trained")

    def __init__(self, parameters: Sequence[Any], plan: Plan, most: int = MOST_NUMBERS) -> None:
        self._plan = plan
        self._trained = [parameter.grad is not None for parameter in parameters]  # afterwards the step may have dropped them
        sizes = [size * (1 + parameter.is_complex()) for size, parameter in zip(plan.sizes, parameters, strict=True)]
        self._share = _share(list(compress(sizes, self._trained)), most)
        self._factors = [1.0] * len(plan.sizes)
        self._before = self._take(parameters)

    def _take(self, parameters: Sequence[Any]) -> list[tuple[Any, list[int], list[int]]]:
        """(numbers, places of the parameters they are of, how many of each)."""
        torch = sys.modules["torch"]
        groups: dict[tuple[Any, ...], list[tuple[int, Any]]] = {}
        plain = (torch.Tensor, torch.nn.Parameter)
        with torch.no_grad():
            for place, parameter in compress(enumerate(parameters), self._trained):
                weights = local(parameter)
                if weights.is_complex():
                    weights = torch.view_as_real(weights.resolve_conj())
                if type(weights) not in plain or not weights.is_floating_point() or not weights.numel():
                    continue  # quantized weights and other kinds of their own
                sample = self._sample(weights, place)
                groups.setdefault((weights.device, weights.dtype, sample.dim()), []).append((place, sample))
            taken = []
            for same in groups.values():
                numbers = torch.cat([sample for _, sample in same]).view(-1)
                if numbers.dtype in (torch.float16, torch.bfloat16):
                    numbers = numbers.float()  # the difference of two halves is no half
                taken.append((numbers, [place for place, _ in same], [sample.numel() for _, sample in same]))
        return taken

    def _sample(self, weights: Any, place: int) -> Any:
        """All of a small parameter; of a large one evenly spaced runs, (runs, RUN): of a cache line every number is used."""
        if not weights.is_contiguous():
            weights = _dense(weights)
        size = weights.numel()
        runs = self._share // RUN
        if size <= self._share or not runs:
            return weights.as_strided((min(size, self._share),), (1,), weights.storage_offset())
        self._factors[place] = size / (runs * RUN)
        spacing, width = size // runs, weights.shape[-1]
        if math.gcd(spacing, width) > RUN and size >= RUN * width:  # whole rows apart, all runs would be of the same columns
            spacing -= -(-width // runs)  # from the first run to the last once through all of them
        return weights.as_strided((runs, RUN), (spacing, 1), weights.storage_offset())

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
        return UpdateRatios(readings, self._factors, self._plan)


def _share(sizes: Sequence[int], most: int) -> int:
    """Numbers that each parameter may have, so that all together have at most `most`; what small ones leave, large ones get."""
    left, waiting = most, sorted(sizes)
    for number, size in enumerate(waiting):
        share = left // (len(waiting) - number)
        if size > share:
            return max(1, share)
        left -= size
    return max(1, waiting[-1] if waiting else 1)


def _dense(weights: Any) -> Any:
    """Weights whose numbers lie one after the other: as they are where only the order differs (channels last), else a copy."""
    ordered = weights.permute(*sorted(range(weights.dim()), key=lambda i: -weights.stride(i)))
    return ordered if ordered.is_contiguous() else weights.contiguous()


class UpdateRatios:
    """Norms of weights and changes, perhaps still on the device."""

    __slots__ = ("_factors", "_plan", "_readings")

    def __init__(self, readings: Sequence[tuple[Reading, Sequence[int]]], factors: Sequence[float], plan: Plan) -> None:
        self._readings, self._factors, self._plan = readings, factors, plan

    def ready(self) -> bool:
        return all(reading.ready() for reading, _ in self._readings)

    def rows(self) -> tuple[float | None, dict[str, float]]:
        """The ratio of all weights, and of each layer; absent where all weights are zero. Once, when ready."""
        return joint_ratios([self])

    def _squares(self) -> Iterator[tuple[int, float, float]]:
        """(place of the parameter, sum of squares of its weights, of its changes)."""
        for reading, places in self._readings:
            values = reading.values()
            for number, place in enumerate(places):
                factor = self._factors[place]  # each number of a sample stands for so many
                yield place, factor * values[number] ** 2, factor * values[len(places) + number] ** 2


def joint_ratios(parts: Sequence[UpdateRatios]) -> tuple[float | None, dict[str, float]]:
    """The ratio of all weights that several optimizers have moved, and of each layer, to which more than one may belong; absent
    where all weights are zero. Once, when all are ready."""
    layers = (parts[0]._plan if len(parts) == 1 else joint_plan([part._plan for part in parts])).layers
    weights, changes = [0.0] * len(layers.names), [0.0] * len(layers.names)
    before = 0
    for part in parts:
        for place, weight, change in part._squares():
            row = layers.of[before + place]
            weights[row] += weight
            changes[row] += change
        before += len(part._plan.ids)
    ratios = {
        name: math.sqrt(change / weight)
        for name, weight, change in zip(layers.names, weights, changes, strict=True)
        if weight != 0.0
    }
    total = sum(weights)
    return (math.sqrt(sum(changes) / total) if total != 0.0 else None), ratios
