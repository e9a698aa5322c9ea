"""Weighs each micro-step in its window, so that a window has the gradient of one big batch.

A window is the micro-steps between two optimizer steps. Averaging the means of micro-batches of unequal size is wrong
(huggingface/transformers issue 34191); right is the mean over all items of the window and of all ranks. With n the
items of a micro-batch, N those of the window on all of `world` ranks, and gradients that the strategy averages over the
ranks, a micro-batch's mean loss must weigh

    world * n / N

N is known before the first backward pass where the loop looked ahead; where every micro-batch has one item (the
default) and the loader its length; or where the window has one micro-step. Else each loss gets n over what is expected,
and the gradients are multiplied once, by what remains, at the end of the window."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from perfagent.errors import ConfigError
from perfagent_loop.strategies import Strategy

__all__ = ["Count", "Window"]

Count = int | float | Tensor
_FOR_ALL = "num_items was given for some micro-steps of a window and not for others; give it for all or none"


class Window:
    """The window in progress. Counts on a device are never read on the host.

    size: micro-steps of a full one. done: micro-steps whose backward pass is over. end: micro-steps of this one, as far
    as known. trivial: a micro-step's loss is taken as it is. uneven: ranks may differ in micro-steps."""

    __slots__ = (
        "_base", "_constant", "_counted", "_device", "_expected", "_items", "_loss", "_strategy", "_total",
        "done", "end", "ranks_steps", "size", "trivial", "uneven",
    )  # fmt: skip

    def __init__(self, size: int, strategy: Strategy) -> None:
        self.size, self._strategy, self._device = size, strategy, strategy.device
        self.uneven = False
        self._expected: Count | None = None  # items of a micro-step, mean over ranks, as in the window before
        self._constant: float | None = None  # the one count that a strategy which reduces early has seen
        self.clear()

    def clear(self) -> None:
        """The next window begins."""
        self.done, self.end = 0, self.size
        self._total: Count | None = None  # items of the window on all ranks, where known from the start
        self._counted: list[Count] = []  # ... and those of each micro-step to come
        self._items: Count | None = None  # items so far on this rank
        self._loss: Any = None  # their summed loss
        self._base = 0
        self.ranks_steps: int | None = None
        self.trivial = self.size == 1 and not self.uneven

    def may_differ(self, uneven: bool) -> None:
        """An epoch begins. uneven: ranks may end it with windows of different lengths that nobody knows beforehand."""
        self.uneven = uneven
        self.clear()

    def will_end(self, end: int, ranks_steps: int | None = None) -> None:
        """end: micro-steps of this window on this rank. ranks_steps: on all ranks together, where they differ."""
        self.end = end
        if ranks_steps is not None:
            self.ranks_steps = ranks_steps
        self.trivial = end == 1 and not self.uneven and self.ranks_steps is None and self._total is None

    def will_hold(self, counts: list[Count]) -> None:
        """The items of every micro-step of this window, on this rank. A collective where there are several ranks."""
        self._counted = [*counts]
        self.end = self.done + len(counts)
        total: Count = sum(counts)
        if self._strategy.world > 1:
            total = self._strategy.total(self._number(total))
        self._total = total.clamp(min=1.0) if isinstance(total, Tensor) else max(total, 1)
        self.trivial = False

    def is_whole(self) -> None:
        """The gradients are those of the window's mean already: nothing is left to be multiplied."""
        self.done = self.end = self._base = 1
        self._total, self._items, self._loss = None, None, None

    def weighted(self, loss: Tensor, num_items: Count | None) -> Tensor:
        """The loss as a part of its window's."""
        world = self._strategy.world
        if self._total is not None:
            return _times(loss, self._counted[self.done] * world / self._total)
        if num_items is not None and self._strategy.reduces_early:
            self._refuse_unequal(num_items)
            num_items = None
        if not self.done:
            self._base = self.end
        if num_items is None and not self.uneven:
            if self._items is not None:
                raise ConfigError(_FOR_ALL)
            if self.ranks_steps is not None:
                return loss * (world / self.ranks_steps)
            return loss if self._base == 1 else loss * (1.0 / self._base)
        if self.done and self._items is None:
            raise ConfigError(_FOR_ALL)
        return self._count(loss, 1 if num_items is None else num_items, says_loss=num_items is not None)

    def _count(self, loss: Tensor, count: Count, *, says_loss: bool) -> Tensor:
        world = self._strategy.world
        if world > 1 or isinstance(count, Tensor):
            count = self._number(count)
        self._items = count if self._items is None else self._items + count
        if self._base == 1:
            if world == 1:
                return loss
            return _times(loss, count * world / _at_least_one(self._sum(count)))
        if says_loss:
            value = loss.detach()
            part = (float(value) if value.is_cpu and not isinstance(count, Tensor) else value) * count
            self._loss = part if self._loss is None else self._loss + part
        if self._expected is None:
            self._expected = _at_least_one(self._sum(count) / world)
        return _times(loss, count / (self._expected * self._base))

    def _sum(self, count: Count) -> Count:
        """Over the ranks; counts of several ranks are tensors."""
        return self._strategy.total(count.clone()) if isinstance(count, Tensor) else count

    def _refuse_unequal(self, num_items: Count) -> None:
        """Gradients that are averaged before the window is known need one count in all micro-batches of all ranks."""
        count = float(num_items)  # sync: waits for a count that is on a device
        if self._constant is None:
            low, high = self._strategy.least(count), -self._strategy.least(-count)
            if low != high:
                raise ConfigError(_unequal(low, high))
            self._constant = count
        if count != self._constant:
            raise ConfigError(_unequal(self._constant, count))

    @property
    def expected(self) -> float | None:
        """Items of a micro-step, as in the window before: what weights are rounded by, and so part of a state. Sync."""
        return None if self._expected is None else float(self._expected)

    @expected.setter
    def expected(self, items: float | None) -> None:
        alone = items is None or self._strategy.world == 1
        self._expected = items if alone else self._number(items)  # type: ignore[arg-type]

    def factor(self) -> Count | None:
        """What the gradients are to be multiplied by at the end of the window; None where they are right as they are.

        A collective on every rank that was given counts."""
        if self._total is not None:
            return None
        if self._items is None:
            return None if self._base == self.done or self.ranks_steps is not None else self._base / self.done
        if self._base == 1 or self._expected is None:
            return None
        world = self._strategy.world
        total = _at_least_one(self._items if world == 1 else self._sum(self._items))
        factor = self._expected * (self._base * world) / total
        self._expected = total / (world * self.done)
        return factor

    def loss(self) -> Any:
        """The mean loss over this rank's items, where the window's weights do not add up to one; else None."""
        return None if self._loss is None or self._items is None else self._loss / _at_least_one(self._items)

    def _number(self, count: Count) -> Tensor:
        """As a number on the device; a Python number goes there without a copy that waits."""
        if isinstance(count, Tensor):
            return count.detach().to(self._device, torch.float64, non_blocking=True)
        return torch.full((), count, dtype=torch.float64, device=self._device)


def _times(loss: Tensor, weight: Count) -> Tensor:
    return loss * (weight.to(torch.float32) if isinstance(weight, Tensor) else weight)


def _at_least_one(count: Count) -> Count:
    """A window in which every item is masked has no mean: its gradients are 0, not NaN."""
    return count.clamp(min=1.0) if isinstance(count, Tensor) else max(count, 1)


def _unequal(first: float, other: float) -> str:
    return (
        f"micro-batches have unequal num_items ({first:g} and {other:g}), and DeepSpeed averages gradients before the window is "
        "known; tell the loop beforehand: loop.batches(loader, items=lambda batch: ...) looks ahead"
    )
