"""Letting go of a batch that a worker has made is part of waiting for the next one.

A loop lets go of a batch where it takes the next: `for x, y in loader` drops the old x and y when the iterator has returned the
new ones. What a worker has made lies in shared memory, and giving that back takes 40 µs a tensor and more (it is unmapped): a
timer round the loader sees it, a hook in the iterator does not. So the memory of such a batch is held here as well, and dropped
the moment the loop lets go of its tensor, between two reads of the clock. It is held no longer than the loop holds it.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator, Mapping
from threading import get_ident
from typing import Any

from perfagent.hooks.account import DATA
from perfagent.hooks.guard import untraced
from perfagent.hooks.progress import Progress, now, state

__all__ = ["SharedBatches"]

_AT_ONCE_NS = 50_000
"""So soon after the iterator has returned, or after the tensor before: later it is the loop's own doing."""
_MOST_TENSORS = 16
_DEPTH = 2

_Held = dict[int, tuple[Any, Any]]
"""id of a weak reference to a tensor -> that reference, and the tensor's storage."""


class SharedBatches:
    """Those of one loader's iterator, of a loader with workers. loader: as the entries of the trace name it."""

    __slots__ = ("__weakref__", "_before", "_newest", "_progress", "loader")

    def __init__(self, p: Progress, loader: int) -> None:
        self._progress, self.loader = p, loader
        self._before: _Held = {}
        self._newest: _Held = {}

    @untraced
    def watch(self, batch: Any) -> None:
        """The iterator is about to return this one; the one before is let go of next."""
        let_go = _method_of(self)
        self._before, self._newest = self._newest, {}
        for tensor in _tensors(batch, _DEPTH):
            if len(self._newest) >= _MOST_TENSORS:
                return
            reference = weakref.ref(tensor, let_go)
            self._newest[id(reference)] = reference, tensor.untyped_storage()

    def let_go(self, reference: Any) -> None:
        """A tensor is no more. On whatever thread that happens."""
        if self._newest.pop(id(reference), None) is not None:
            return
        began = now()
        if self._before.pop(id(reference), None) is None:  # here the memory is given back
            return
        p = self._progress
        if state.current is not p or p.thread != get_ident() or not p.trace:
            return
        entry = p.trace[-1]
        if entry[0] == DATA and entry[3] == self.loader and began - entry[2] < _AT_ONCE_NS:
            p.trace[-1] = (DATA, entry[1], now(), entry[3], entry[4])


def _method_of(batches: SharedBatches) -> Any:
    """Its `let_go`, without keeping it alive."""
    mine = weakref.ref(batches)

    def let_go(reference: Any) -> None:
        alive = mine()
        if alive is not None:
            alive.let_go(reference)

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
