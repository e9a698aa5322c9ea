"""Times data waits, the time that the training thread spends inside a DataLoader's iterator, and counts samples.

`_BaseDataLoaderIter.__next__` and `DataLoader.__iter__` (which starts the workers) are patched on their classes.
Subclasses that call super() are counted once. The call that ends an epoch counts as a wait, too. A plain generator is
not seen here: `run.batches(iterable)` times it; otherwise its time stays in `other`, never in `forward`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from operator import attrgetter
from threading import get_ident
from typing import Any, TypeVar

from perfagent.boundary.dynamo import Function, keep_out_of_frames, not_traced, untraced
from perfagent.boundary.guard import guarded
from perfagent.measure.batches.contents import Contents
from perfagent.measure.batches.size import Measure, is_raw, reader
from perfagent.step.state import StepState, now, state
from perfagent.step.trace import DATA, MOST_ITEMS, shorten

__all__ = ["contents_of", "measure_of", "timed", "watch_iter", "watch_next"]

Item = TypeVar("Item")


def watch_next(original: Function, id_of: Callable[[Any], int] = id) -> Function:
    """Wraps _BaseDataLoaderIter.__next__."""

    @functools.wraps(original)
    def __next__(self: Any) -> Any:  # noqa: N807 - the name that tracebacks show
        p = state.current
        if p is None or p.data_depth or p.phase_depth or p.thread != get_ident():
            return original(self)
        began = now()
        was_open = p.opened
        p.data_depth = 1
        p.opened = True  # log() calls from now on belong to the next step
        if not p.losses.seen_backward:
            p.logs.fetched = True
            if p.early:  # a whole iteration without a backward pass: this process does not train, at least not yet
                p.settle_early(None)
        try:
            batch = original(self)
        except BaseException as error:
            p.opened = was_open  # the epoch is over: no next step has started, and log() belongs to the last one
            _ended(p, id_of(self), began, error)
            raise
        finally:
            p.data_depth = 0
        _got(p, id_of(self), batch, began, self)
        return batch

    return __next__


def watch_iter(original: Function) -> Function:
    """Wraps DataLoader.__iter__: starting workers counts as a wait for data."""

    @functools.wraps(original)
    def __iter__(self: Any) -> Any:  # noqa: N807
        p = state.current
        if p is None:
            return original(self)
        iterator = _begun(p, original, self)
        if _counts(p):
            _begin_epoch(p, self, id(iterator))
        return iterator

    return __iter__


@guarded
def _begin_epoch(p: StepState, loader: Any, iteration: int) -> None:
    contents_of(p).begun(loader, iteration)


@guarded
def _ended(p: StepState, loader: int, began: int, error: BaseException) -> None:
    p.readers.pop(loader, None)  # the next iterator may get its id
    if p.contents is not None:
        p.contents.ended(loader)
    p.trace.extend((began, now(), loader, None, DATA))
    if isinstance(error, (RuntimeError, MemoryError)):
        p.links.investigator.passing(error)


@guarded
def _got(p: StepState, loader: int, batch: object, began: int, iterator: object) -> None:
    measure = p.readers.get(loader)
    if measure is None:
        sampler = getattr(iterator, "_index_sampler", None)
        measure = measure_of(p, loader, batch, getattr(sampler, "batch_size", None))
    size = measure(batch)
    contents: Contents = p.contents or contents_of(p)
    contents.inspect(loader, batch)
    p.trace.extend((began, now(), loader, size, DATA))  # includes our share, as a timer around the loader would
    if len(p.trace) > MOST_ITEMS:  # a process that loads or evaluates and never trains must not use ever more memory
        shorten(p.trace)


@untraced
def contents_of(p: StepState) -> Contents:
    """Returns what looks into the batches of the run."""
    contents: Contents | None = p.contents
    if contents is None:
        p.contents = contents = Contents(p)
        keep_out_of_frames()
    return contents


@untraced
def measure_of(p: StepState, loader: int, batch: object, batch_size: Any = None) -> Measure:
    """Chooses how to read the size of this loader's batches from now on."""
    if len(p.readers) > 64:
        p.readers.clear()
    if is_raw(batch):
        p.losses.parts_for = sys.maxsize
    measure = p.readers[loader] = untraced(reader(batch, batch_size))
    keep_out_of_frames()
    return measure


class _Iteration:
    """An iteration by `timed`. number: stands for its id, which is often that of the one before, now gone."""

    __slots__ = ("iterator", "number")
    _numbers = count(1)

    def __init__(self, iterator: Iterator[Any]) -> None:
        self.iterator, self.number = iterator, next(self._numbers)


_next = not_traced(watch_next(lambda iteration: next(iteration.iterator), attrgetter("number")))


def timed(p: StepState, iterable: Iterable[Item]) -> Iterator[Item]:
    """Yields the items of any iterable, and counts the wait for each as a data wait."""
    iteration = _Iteration(_begun(p, iter, iterable))
    while True:
        try:
            item: Item = _next(iteration)
        except StopIteration:
            return
        yield item


def _counts(p: StepState) -> bool:
    return p is state.current and p.thread == get_ident() and not p.data_depth and not p.phase_depth


def _begun(p: StepState, begin: Callable[[Any], Any], iterable: Any) -> Any:
    """Returns an iterator of it. Starting the workers of a loader counts as a data wait."""
    if not _counts(p):
        return begin(iterable)
    p.data_depth = 1
    began = now()
    try:
        return begin(iterable)
    finally:
        p.data_depth = 0
        p.trace.extend((began, now(), 0, None, DATA))
