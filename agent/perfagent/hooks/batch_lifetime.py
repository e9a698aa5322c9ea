"""Adds to the wait for the next batch the time that the loop takes to free the old one.

A loop frees a batch when it takes the next: `for x, y in loader` drops the old x and y when the iterator has returned
the new ones. A timer around the loader includes that time, a hook in the iterator does not, and it can be long, since
the memory of a large tensor goes back to the system. Measured on a machine with two cores: 0.2 to 0.3 ms per MiB, an
eighth of the time in which a loader without workers makes the batch; from a worker, in shared memory, 40 µs for any
tensor and 6 ms for a batch of 19 MiB.

No hook runs when that is over: Python reports the end of a tensor just before its memory is freed. So a few tensors are
measured: their memory is held until the next batch is requested, and is freed then between two reads of the clock. For
later tensors the wait is extended by the measured time. A loader whose batches cost nothing to free is checked once in
a thousand batches.

Timed until the iterator returned, 40 % of the wait was missing with 5 MiB a batch from a worker, an eighth with a
loader without workers. Not every batch is held, since the workers need the room; and none until the model is called,
since the loop's own work on the batch would count as waiting.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from itertools import islice
from threading import get_ident
from types import CodeType, FrameType
from typing import Any

from perfagent.boundary.dynamo import untraced
from perfagent.boundary.guard import guarded
from perfagent.step.state import Progress, now, state
from perfagent.step.trace import DATA, FIELDS

__all__ = ["Costs", "Release"]

_AT_ONCE_NS = 50_000
"""Longest time after the iterator returned, or after the tensor before: a tensor freed later is the loop's own work."""
_MOST_TENSORS = 16
_DEPTH = 2
_CALLERS = 3
"""Frames to check: the loop's, and those between it and the iterator, such as a progress bar's generator."""
_MOST_LOADERS = 4
_LOOKS = 4
"""Batches of a loader that decide whether freeing them costs anything."""
_FIRST_MEASURED = 3
_MEASURED_EVERY = 32
_LATEST = 5
_NEGLIGIBLE_NS = 3_000
"""About the cost of checking."""
_REST_BATCHES = 1000
_MOST_HELD_BYTES = 256 << 20
_MOST_HELD_NS = 5 * 10**9
_SHARED_MEMORY = "/dev/shm"  # noqa: S108 - looked at, not written to
_SPARE = 4
"""So many times the size of the held memory must be free where the workers put their batches."""

_Held = dict[int, tuple[Any, Any]]
"""id of a weak reference to a tensor -> (that reference, the tensor's storage)"""


class _Loader:
    """The batches of one loader's iterator: the newest, in use, and the one before, about to be dropped."""

    __slots__ = ("before", "looks", "newest", "rest", "shared")

    def __init__(self) -> None:
        self.before: _Held = {}
        self.newest: _Held = {}
        self.looks = self.rest = 0
        self.shared = False


class Release:
    """Measures how long a run's loop takes to free its batches. held: storages to free at the next request."""

    __slots__ = (
        "__weakref__",
        "_callers",
        "_expected_ns",
        "_held_since",
        "_lines",
        "_loaders",
        "_progress",
        "costs",
        "held",
    )

    def __init__(self, p: Progress) -> None:
        self._progress = p
        self._loaders: dict[int, _Loader] = {}
        self.costs = Costs()
        self._callers: dict[int, int] = {}
        self._lines: dict[tuple[int, int, int], tuple[CodeType, bool]] = {}
        self._expected_ns = self._held_since = 0
        self.held: list[Any] = []

    @guarded
    def settle(self) -> None:
        """Frees the held storages when a batch is requested, and records how long that took."""
        held, self.held = self.held, []
        for size, ns in _let_go_of(held):
            self.costs.note(size, ns)

    def expire(self) -> None:
        """Frees storages that were held for long: the loop has ended, or a step takes so long that the time does not
        matter. Any thread."""
        if self.held and now() - self._held_since > _MOST_HELD_NS:
            held, self.held = self.held, []
            for _ in _let_go_of(held):
                pass

    @untraced
    def watch(self, iterator: Any, batch: Any, caller: FrameType | None) -> None:
        """Registers the batch that the iterator is about to return to its caller, who then frees the one before."""
        loader = self._loaders.get(id(iterator)) or self._loader(id(iterator))
        if loader.rest:
            loader.rest -= 1
            return
        loader.before, loader.newest = loader.newest, {}
        if getattr(iterator, "_pin_memory", False):  # torch keeps pinned memory for the next batch
            loader.rest = _REST_BATCHES
            return
        loader.shared = bool(getattr(iterator, "_num_workers", 0))
        let_go = _method_of(self, loader)
        for tensor in islice(_tensors(batch, _DEPTH), _MOST_TENSORS):
            reference = weakref.ref(tensor, let_go)
            loader.newest[id(reference)] = reference, tensor.untyped_storage()
        loader.looks += 1
        if loader.looks > _LOOKS:
            loader.looks = 0
            if self._costs_nothing(loader):
                loader.newest, loader.before = {}, {}
                loader.rest = _REST_BATCHES
                return
        self._expected_ns = 0
        self._callers.clear()
        while caller is not None and len(self._callers) < _CALLERS:
            self._callers[id(caller)] = caller.f_lasti
            caller = caller.f_back

    def let_go(self, loader: _Loader, reference: Any, frame: FrameType) -> None:
        """Called when a tensor is freed, on whatever thread. frame: the frame that was running."""
        if loader.newest.pop(id(reference), None) is not None:
            return
        _, storage = loader.before.pop(id(reference), (None, None))
        if storage is None:
            return
        p = self._progress
        if state.current is not p or p.thread != get_ident() or len(p.trace) < FIELDS[DATA]:
            return
        _, ended, _, _, kind = p.trace[-5:]
        if kind != DATA or now() - ended > _AT_ONCE_NS + self._expected_ns or not self._fetches(frame):
            return
        size = storage.nbytes()
        if self.costs.wants(size) and self._may_hold(size, shared=loader.shared):
            self.held.append(storage)
            self._held_since = now()
        else:
            self._expected_ns = self.costs.ns(size)
            p.trace[-4] = now() + self._expected_ns

    def _loader(self, number: int) -> _Loader:
        if len(self._loaders) >= _MOST_LOADERS:  # each epoch has a new iterator
            del self._loaders[next(iter(self._loaders))]
        self._loaders[number] = made = _Loader()
        return made

    def _costs_nothing(self, loader: _Loader) -> bool:
        return sum(self.costs.ns(storage.nbytes()) for _, storage in loader.newest.values()) < _NEGLIGIBLE_NS

    def _may_hold(self, size: int, *, shared: bool) -> bool:
        """True if the workers' next batch still fits into shared memory."""
        size += sum(storage.nbytes() for storage in self.held)
        if not shared or size > _MOST_HELD_BYTES:
            return size <= _MOST_HELD_BYTES
        try:
            space = os.statvfs(_SHARED_MEMORY)
        except OSError:
            return False
        return space.f_bavail * space.f_frsize > _SPARE * size

    def _fetches(self, frame: FrameType) -> bool:
        """True if the frame runs the line that requested the batch: the head of a loop, `x, y = next(batches)`. A later
        line frees it after a timer around the loader has stopped."""
        asked = self._callers.get(id(frame))
        if asked is None:
            return False
        code = frame.f_code
        key = id(code), asked, frame.f_lasti
        known = self._lines.get(key)
        if known is None or known[0] is not code:
            if len(self._lines) > 64:  # a script that keeps creating code
                self._lines.clear()
            known = self._lines[key] = code, _line(code, asked) == _line(code, frame.f_lasti)
        return known[1]


def _let_go_of(held: list[Any]) -> Iterator[tuple[int, int]]:
    """Frees each storage; yields its bytes and the ns that took. Two threads may share one list."""
    while True:
        try:
            storage = held.pop()
        except IndexError:
            return
        size = storage.nbytes()
        began = now()
        del storage  # frees the memory
        yield size, now() - began


class Costs:
    """The ns that it takes to free a storage of a given size: the median of the latest few."""

    __slots__ = ("_asked", "_latest", "_medians")

    def __init__(self) -> None:
        self._latest: dict[int, deque[int]] = {}
        self._medians: dict[int, int] = {}
        self._asked: dict[int, int] = {}

    def wants(self, size: int) -> bool:
        """True if a storage of this size should be measured: the first few, then one now and then."""
        key = _about(size)
        self._asked[key] = asked = self._asked.get(key, 0) + 1
        return asked % _MEASURED_EVERY == 0 or len(self._latest.get(key, ())) < _FIRST_MEASURED

    def note(self, size: int, ns: int) -> None:
        key = _about(size)
        latest = self._latest.setdefault(key, deque(maxlen=_LATEST))
        latest.append(ns)
        self._medians[key] = sorted(latest)[len(latest) // 2]

    def ns(self, size: int) -> int:
        return self._medians.get(_about(size), 0)


def _about(size: int) -> int:
    """Returns one number for all sizes with about the same number of pages, within an eighth."""
    pages = size >> 12
    exponent = max(pages.bit_length() - 4, 0)
    return exponent * 16 + (pages >> exponent)


def _line(code: CodeType, instruction: int) -> int | None:
    """Returns the source line of the instruction at this offset."""
    return next(islice(code.co_positions(), instruction // 2, None), (None,))[0]


def _method_of(release: Release, loader: _Loader) -> Any:
    """Returns `release.let_go` as a callback that does not keep `release` alive."""
    mine = weakref.ref(release)

    def let_go(reference: Any) -> None:
        alive = mine()
        if alive is not None:
            alive.let_go(loader, reference, sys._getframe(1))

    return let_go


def _tensors(batch: Any, depth: int) -> Iterator[Any]:
    """Yields the plain tensors of a batch in host memory: the batch itself, or those in tuples, lists and mappings."""
    torch: Any = sys.modules["torch"]
    if type(batch) is torch.Tensor:
        if batch.is_cpu and batch.layout is torch.strided:
            yield batch
    elif depth:
        items = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (tuple, list)) else ()
        for item in items:
            yield from _tensors(item, depth - 1)
