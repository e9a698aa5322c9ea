"""Restores for the second computation of a block what the first one found, beyond torch's random numbers.

torch's checkpoint runs a block's forward() again. A block that changes a buffer as it runs (running statistics,
spectral norm's vectors) would change it twice; one that draws from Python or numpy would draw something else.

What a block changes and draws from is learned from its first forward pass, by comparing (which waits for a GPU, once).
What did not move then is not copied again; a block that draws only now and then needs torch's generator."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

__all__ = ["Kept", "contexts"]

Context = AbstractContextManager[Any]


class Moving(NamedTuple):
    """What a block's forward pass moves: buffers by name, Python's generator, numpy's."""

    buffers: frozenset[str]
    python: bool
    numpy: bool


class Kept:
    """What a block's forward passes change, by which of its modules are in training mode; learned in the first pass."""

    __slots__ = ("moving",)

    def __init__(self) -> None:
        self.moving: dict[tuple[bool, ...], Moving] = {}


def contexts(
    block: nn.Module, kept: Kept, selective: Callable[[], tuple[Context, Context]] | None, *, preserve_rng: bool
) -> tuple[Context, Context]:
    """The contexts of a call's first and second computation. selective: makes those of selective checkpointing."""
    before = _Before(block, kept, preserve_rng)
    again = _Again(before)
    if selective is None:
        return before, again
    first, second = selective()
    return _both(before, first), _both(again, second)


@contextmanager
def _both(outer: Context, inner: Context) -> Iterator[None]:
    with outer, inner:
        yield


class _Before:
    """Round the first computation: notes what the second one must begin from."""

    def __init__(self, block: nn.Module, kept: Kept, preserve_rng: bool) -> None:
        self.block, self._kept, self._preserve_rng = block, kept, preserve_rng
        self.buffers: dict[str, Tensor] = {}
        self.python: Any = None
        self.numpy: Any = None
        self._training: tuple[bool, ...] = ()

    def __enter__(self) -> None:
        self._training = tuple(module.training for module in self.block.modules())
        known = self._kept.moving.get(self._training)
        if known is None or known.buffers:
            for name, buffer in self.block.named_buffers():
                if known is None or name in known.buffers:
                    self.buffers[name] = buffer.detach().clone()
        if self._preserve_rng and (known is None or known.python):
            self.python = random.getstate()
        numpy = sys.modules.get("numpy.random")
        if self._preserve_rng and numpy is not None and (known is None or known.numpy):
            self.numpy = numpy.get_state()

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is not None or self._training in self._kept.moving:
            return
        now = dict(self.block.named_buffers())
        moving = Moving(
            frozenset(name for name, value in self.buffers.items() if not torch.equal(value, now[name])),
            self.python is not None and random.getstate() != self.python,
            self.numpy is not None and not _same(sys.modules["numpy.random"].get_state(), self.numpy),
        )
        self._kept.moving[self._training] = moving
        self.buffers = {name: value for name, value in self.buffers.items() if name in moving.buffers}
        self.python = self.python if moving.python else None
        self.numpy = self.numpy if moving.numpy else None


class _Again:
    """Round the second computation: as it was before the first one, and afterwards as it is now."""

    def __init__(self, before: _Before) -> None:
        self._before = before
        self._now: dict[str, Tensor] = {}
        self._python: Any = None
        self._numpy: Any = None

    def __enter__(self) -> None:
        before = self._before
        if before.buffers:
            self._now = self._swap(before.buffers)
        if before.python is not None:
            self._python = random.getstate()
            random.setstate(before.python)
        if before.numpy is not None:
            numpy = sys.modules["numpy.random"]
            self._numpy = numpy.get_state()
            numpy.set_state(before.numpy)

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if self._now:
            self._swap(self._now)
            self._now = {}
        if self._python is not None:
            random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy.random"].set_state(self._numpy)

    def _swap(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """Writes these values into the block's buffers; returns what was in them."""
        found = {}
        with torch.no_grad():
            for name, buffer in self._before.block.named_buffers():
                if name in values:
                    found[name] = buffer.detach().clone()
                    buffer.copy_(values[name])
        return found


def _same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return one[2] == other[2] and bool((one[1] == other[1]).all()) and one[3:] == other[3:]
