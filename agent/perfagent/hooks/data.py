"""Data wait: the time the stepping thread spends inside a DataLoader's iterator, and how many samples come out of it.

`_BaseDataLoaderIter.__next__` and `DataLoader.__iter__` (which starts the workers) are patched on their classes. Subclasses
that call super() are counted once. The call that ends an epoch counts as wait too. A plain generator is not seen here:
`run.batches(iterable)` times it, or its time stays in `other`, never in `forward`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from threading import get_ident
from typing import Any, TypeVar

from perfagent.hooks.guard import guarded
from perfagent.hooks.progress import Progress, active, now
from perfagent.signals.throughput import reader

__all__ = ["timed", "watch_iter", "watch_next"]

Item = TypeVar("Item")


def watch_next(original: Callable[..., Any]) -> Callable[..., Any]:
    """_BaseDataLoaderIter.__next__, watched."""

    @functools.wraps(original)
    def __next__(self: Any) -> Any:  # noqa: N807 - the name that tracebacks show
        p = active()
        if p is None or p.data_depth or p.phase_depth or p.thread != get_ident():
            return original(self)
        was_open = p.opened
        p.data_depth = 1
        started = now()
        p.fetches += 1
        p.open()
        try:
            batch = original(self)
        except StopIteration:
            p.opened = was_open  # no next step has started: the epoch is over, and what is logged now belongs to the last one
            raise
        finally:
            p.data_depth = 0
            p.fetches -= 1
            p.fetched(id(self), started, now())
        _measure(p, id(self), batch)
        return batch

    return __next__


def watch_iter(original: Callable[..., Any]) -> Callable[..., Any]:
    """DataLoader.__iter__, watched: starting workers is waiting for data."""

    @functools.wraps(original)
    def __iter__(self: Any) -> Any:  # noqa: N807
        p = active()
        if p is None or p.data_depth or p.phase_depth or p.thread != get_ident():
            return original(self)
        p.data_depth = 1
        started = now()
        try:
            return original(self)
        finally:
            p.data_depth = 0
            p.data_ns += now() - started

    return __iter__


@guarded
def _measure(p: Progress, loader: int, batch: Any) -> None:
    started = now()
    measure = p.readers.get(loader)
    if measure is None:
        measure = p.readers[loader] = reader(batch)
    p.queue(loader, measure(batch))
    p.own_ns += now() - started


def timed(p: Progress, iterable: Iterable[Item]) -> Iterator[Item]:
    """The items of any iterable, with the wait for each counted as data wait."""
    loader = id(iterable)
    iterator = iter(iterable)
    while True:
        if p is not active() or p.thread != get_ident():
            yield from iterator
            return
        depth, was_open = p.data_depth, p.opened
        p.data_depth = 1  # a DataLoader below is not counted a second time
        started = now()
        p.fetches += 1
        p.open()
        try:
            item = next(iterator)
        except StopIteration:
            p.opened = was_open
            return
        finally:
            p.data_depth = depth
            p.fetches -= 1
            if not depth:
                p.fetched(loader, started, now())
        if not depth:
            _measure(p, loader, item)
        yield item
