"""Letting go of a batch is part of waiting for the next one.

A loop lets go of a batch where it takes the next: `for x, y in loader` drops the old x and y when the iterator has returned the
new ones. A timer round the loader sees what that takes, a hook in the iterator does not, and it is much: the memory of a large
tensor goes back to the system. Measured on a machine with two cores, 0.2 to 0.3 ms a MiB, an eighth of what a loader without
workers took to make the batch; from a worker, in shared memory, 40 µs for any tensor and 6 ms for a batch of 19 MiB.

Nothing runs when that is over: Python tells of the end of a tensor just before its memory goes. So a few batches are measured.
Their memory is held until the next batch is asked for, and goes there, between two reads of the clock; of the batches after
them the wait is longer by what it took. What a loader gives that costs nothing to drop is looked at once in a thousand batches.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from itertools import islice
from statistics import median
from threading import get_ident
from types import CodeType, FrameType
from typing import Any

from perfagent.hooks.account import DATA, FIELDS
from perfagent.hooks.guard import guarded, untraced
from perfagent.hooks.progress import Progress, now, state

__all__ = ["Release"]

_AT_ONCE_NS = 50_000
"""So soon after the iterator has returned, or after the tensor before: later it is the loop's own doing."""
_MOST_TENSORS = 16
_DEPTH = 2
_CALLERS = 3
"""The loop, and what may lie between it and the iterator: a progress bar's generator, a framework's."""
_FIRST_MEASURED = 4
_MEASURED_EVERY = 32
_LATEST = 5
_NEGLIGIBLE_NS = 3_000
"""As much as looking costs."""
_REST_BATCHES = 1000
_MOST_HELD_BYTES = 256 << 20
_SHARED_MEMORY = "/dev/shm"  # noqa: S108 - looked at, not written to
_SPARE = 4
"""So many times what is held must be free where the workers put their batches."""

_Held = dict[int, tuple[Any, Any]]
"""id of a weak reference to a tensor -> that reference, and the tensor's storage."""


class Release:
    """What a run's loop lets go of. held: storages of a batch that is measured. rest: so many batches are not looked at."""

    __slots__ = (
        "__weakref__", "_before", "_callers", "_costs", "_loader", "_measured", "_newest", "_progress", "_same_line", "_seen",
        "_shared", "held", "rest",
    )  # fmt: skip

    def __init__(self, p: Progress) -> None:
        self._progress = p
        self._before: _Held = {}
        self._newest: _Held = {}
        self._callers: dict[int, int] = {}
        self._costs = _Costs()
        self._same_line: dict[tuple[int, int, int], bool] = {}
        self._loader = self._seen = 0
        self._measured = self._shared = False
        self.held: list[Any] = []
        self.rest = 0

    @guarded
    def settle(self) -> None:
        """A batch is asked for: what was held goes, and what that took is noted."""
        held, self.held = self.held, []
        while held:
            size = held[-1].nbytes()
            began = now()
            held.pop()  # here the memory is given back
            self._costs.note(size, now() - began)

    @untraced
    def watch(self, iterator: Any, batch: Any, caller: FrameType | None) -> None:
        """The iterator is about to return this one to its caller; the one before is let go of next."""
        if id(iterator) != self._loader:  # a new one for each epoch; of the one before nothing is kept
            self._loader, self._newest, self._seen = id(iterator), {}, 0
            self._shared = bool(getattr(iterator, "_num_workers", 0))
        self._before, self._newest = self._newest, {}
        if getattr(iterator, "_pin_memory", False):  # torch keeps such memory for the next batch
            self.rest = _REST_BATCHES
            return
        let_go = _method_of(self)
        for tensor in islice(_tensors(batch, _DEPTH), _MOST_TENSORS):
            reference = weakref.ref(tensor, let_go)
            self._newest[id(reference)] = reference, tensor.untyped_storage()
        self._seen += 1
        self._measured = self._seen <= _FIRST_MEASURED or self._seen % _MEASURED_EVERY == 0
        if self._seen == _FIRST_MEASURED + 1 and self._costs_nothing():
            self._newest, self._before = {}, {}
            self._seen, self.rest = 0, _REST_BATCHES
            return
        self._callers.clear()
        while caller is not None and len(self._callers) < _CALLERS:
            self._callers[id(caller)] = caller.f_lasti
            caller = caller.f_back

    def let_go(self, reference: Any, frame: FrameType) -> None:
        """A tensor is no more. On whatever thread that happens. frame: which runs."""
        if self._newest.pop(id(reference), None) is not None:
            return
        _, storage = self._before.pop(id(reference), (None, None))
        if storage is None:
            return
        p = self._progress
        if state.current is not p or p.thread != get_ident() or len(p.trace) < FIELDS[DATA]:
            return
        _, ended, loader, _, kind = p.trace[-5:]
        if kind != DATA or loader != self._loader or now() - ended > _AT_ONCE_NS or not self._fetches(frame):
            return
        if not self._measured:
            p.trace[-4] = now() + self._costs.ns(storage.nbytes())
        elif self._may_hold(storage.nbytes()):
            self.held.append(storage)

    def _costs_nothing(self) -> bool:
        return sum(self._costs.ns(storage.nbytes()) for _, storage in self._newest.values()) < _NEGLIGIBLE_NS

    def _may_hold(self, size: int) -> bool:
        """The workers' next batch must fit beside it."""
        size += sum(storage.nbytes() for storage in self.held)
        if not self._shared or size > _MOST_HELD_BYTES:
            return size <= _MOST_HELD_BYTES
        try:
            space = os.statvfs(_SHARED_MEMORY)
        except OSError:
            return False
        return space.f_bavail * space.f_frsize > _SPARE * size

    def _fetches(self, frame: FrameType) -> bool:
        """Whether it happens in the line that asked for the batch: the head of a loop, `x, y = next(batches)`. A line further
        down lets go of it where a timer round the loader has been read."""
        asked = self._callers.get(id(frame))
        if asked is None:
            return False
        key = id(frame.f_code), asked, frame.f_lasti
        same = self._same_line.get(key)
        if same is None:
            if len(self._same_line) > 64:  # code that is made anew all the time
                self._same_line.clear()
            same = self._same_line[key] = _line(frame.f_code, asked) == _line(frame.f_code, frame.f_lasti)
        return same


class _Costs:
    """ns to give back the memory of a storage, by its size: the median of the latest few."""

    __slots__ = ("_latest", "_medians")

    def __init__(self) -> None:
        self._latest: dict[int, deque[int]] = {}
        self._medians: dict[int, int] = {}

    def note(self, size: int, ns: int) -> None:
        key = _about(size)
        latest = self._latest.setdefault(key, deque(maxlen=_LATEST))
        latest.append(ns)
        self._medians[key] = int(median(latest))

    def ns(self, size: int) -> int:
        return self._medians.get(_about(size), 0)


def _about(size: int) -> int:
    """One number for sizes of about the same number of pages, within an eighth of it."""
    pages = size >> 12
    exponent = max(pages.bit_length() - 4, 0)
    return exponent * 16 + (pages >> exponent)


def _line(code: CodeType, instruction: int) -> int | None:
    """The line of the source to which an instruction belongs, by the offset of it."""
    return next(islice(code.co_positions(), instruction // 2, None), (None,))[0]


def _method_of(release: Release) -> Any:
    """Its `let_go`, without keeping it alive."""
    mine = weakref.ref(release)

    def let_go(reference: Any) -> None:
        alive = mine()
        if alive is not None:
            alive.let_go(reference, sys._getframe(1))

    return let_go


def _tensors(batch: Any, depth: int) -> Iterator[Any]:
    """The plain tensors of a batch: itself, or in tuples, lists and mappings."""
    torch: Any = sys.modules["torch"]
    if type(batch) is torch.Tensor:
        if batch.layout is torch.strided:
            yield batch
    elif depth:
        items = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (tuple, list)) else ()
        for item in items:
            yield from _tensors(item, depth - 1)
