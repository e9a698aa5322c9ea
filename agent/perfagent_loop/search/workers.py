"""`perfagent.find_num_workers`: the fewest DataLoader workers that are as fast as can be, or as needed."""

from __future__ import annotations

import gc
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from perfagent.errors import ConfigError
from perfagent.step.state import unwatched
from perfagent_loop.kinds import Batch
from perfagent_loop.randomness import random_state, restore_random_state

__all__ = ["Endless", "WorkersTrial", "find_num_workers", "more_workers_than_cores", "search_num_workers"]

NEAR = 0.9
"""A number of workers is as good as the best from this share of its rate on: fewer processes take less memory."""
_FRUITLESS = 2
"""So many larger numbers in a row without gain end the search."""
_GAIN = 1.05


@dataclass(frozen=True, slots=True)
class WorkersTrial:
    """seconds: from one batch to the next once the workers run; None where the loader failed, and `error` says why."""

    workers: int
    seconds: float | None
    error: str = ""


def find_num_workers(
    make_loader: Callable[[int], Iterable[Batch]],
    candidates: Sequence[int] | None = None,
    *,
    batches: int = 20,
    most_s: float = 5.0,
    step_s: float | None = None,
) -> int:
    """Finds the smallest `num_workers` of a DataLoader that is as fast as any, or as fast as the training needs.

    The first batches are not counted, because they wait for the processes to start. A loader that ends is begun again.
    The search ends early if more workers bring nothing. The random generators are restored.

    Args:
        make_loader: Makes a loader with a number of workers: `lambda n: DataLoader(data, batch_size=32,
            num_workers=n)`.
        candidates: Numbers to try; 0, 1, 2, 4 ... up to the larger of 8 and twice the cores by default.
        batches: How many batches a trial reads at most.
        most_s: How many seconds a trial takes at most, without the start of the workers.
        step_s: Seconds of a training step without its data. If given, the fewest workers are chosen whose batches come
            in that time.

    Raises:
        ConfigError: A candidate is no number of workers, or the loader has no batches. The loader's own error is raised
            if no candidate works.
    """
    return search_num_workers(make_loader, candidates, batches=batches, most_s=most_s, step_s=step_s)[0]


def search_num_workers(
    make_loader: Callable[[int], Iterable[Batch]],
    candidates: Sequence[int] | None,
    *,
    batches: int,
    most_s: float,
    step_s: float | None = None,
) -> tuple[int, list[WorkersTrial]]:
    """The answer, and what was tried on the way."""
    if not callable(make_loader):
        raise ConfigError(f"make_loader must be a function of a number of workers, not {type(make_loader).__name__}")
    if batches < 1 or most_s <= 0:
        raise ConfigError(f"batches must be 1 or more and most_s above 0, not {batches!r:.20} and {most_s!r:.20}")
    trials: list[WorkersTrial] = []
    problem: Exception | None = None
    before = random_state()
    try:
        with unwatched():
            for workers in _candidates(candidates):
                try:
                    trials.append(WorkersTrial(workers, _measure(make_loader, workers, batches, most_s)))
                except (RuntimeError, MemoryError, OSError) as error:
                    problem = error  # shared memory or processes ran out, most likely: fewer may still do
                    trials.append(WorkersTrial(workers, None, str(error).strip().split("\n", 1)[0][:200]))
                    gc.collect()  # the error's frames hold the loader, and with it its processes
                    break
                if _enough(trials, step_s):
                    break
            first = trials[0]
            if first.workers == 0 and first.seconds is not None and _fewest(trials, step_s):
                trials[0] = WorkersTrial(0, min(first.seconds, _measure(make_loader, 0, batches, most_s)))
    finally:
        restore_random_state(before)
    if problem is not None and all(trial.seconds is None for trial in trials):
        raise problem
    return _fewest(trials, step_s), trials


def _fewest(trials: Sequence[WorkersTrial], step_s: float | None) -> int:
    """The fewest workers that are as good as the best, or good enough for a step."""
    working = [(trial.workers, trial.seconds) for trial in trials if trial.seconds is not None]
    best = min(seconds for _, seconds in working)
    wanted = best / NEAR if step_s is None else max(step_s, best)
    return min(workers for workers, seconds in working if seconds <= wanted)


def _candidates(given: Sequence[int] | None) -> list[int]:
    if given is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return [0, *(2**power for power in range(max(8, 2 * cores).bit_length()))]
    if not given or any(type(one) is not int or one < 0 for one in given):
        raise ConfigError(f"candidates must be numbers of workers, 0 or more, such as [0, 2, 4, 8], not {given!r:.80}")
    return sorted(set(given))


def _enough(trials: list[WorkersTrial], step_s: float | None) -> bool:
    seconds = [trial.seconds for trial in trials if trial.seconds is not None]
    if step_s is not None and seconds[-1] <= step_s:
        return True
    if len(seconds) <= _FRUITLESS:
        return False
    return min(seconds[:-_FRUITLESS]) <= _GAIN * min(seconds[-_FRUITLESS:])


@contextmanager
def more_workers_than_cores() -> Iterator[None]:
    """torch warns of them; here they are meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create .* worker processes", UserWarning)
        yield


def _measure(make_loader: Callable[[int], Iterable[Batch]], workers: int, batches: int, most_s: float) -> float:
    """Seconds from batch to batch, of a loader whose queues have been emptied once."""
    with more_workers_than_cores():
        loader = make_loader(workers)
    source = Endless(loader)
    try:
        # batches that were begun while the processes started are there at once and would flatter the rate
        for _ in range(1 + workers * (getattr(loader, "prefetch_factor", None) or 0)):
            source.next()
        begin = time.perf_counter()
        count = 0
        while not count or (count < batches and time.perf_counter() - begin < most_s):
            source.next()
            count += 1
        return (time.perf_counter() - begin) / count
    finally:
        source.close()


class Endless:
    """A loader's batches, from the beginning again at its end."""

    def __init__(self, loader: Iterable[Batch]) -> None:
        self._loader: Any = loader
        self._iterator: Iterator[Batch] | None = None
        self._passed = 0

    def next(self) -> Any:
        """Raises ConfigError for a loader without batches."""
        while True:
            if self._iterator is None:
                with more_workers_than_cores():
                    self._iterator = iter(self._loader)
            try:
                batch = next(self._iterator)
            except StopIteration:
                if not self._passed:
                    raise ConfigError("the loader has no batches; give it data, or drop_last=False") from None
                self._iterator, self._passed = None, 0
            else:
                self._passed += 1
                return batch

    def close(self) -> None:
        """Ends the workers now, those of persistent_workers=True too."""
        stop = getattr(self._iterator, "_shutdown_workers", None)
        if callable(stop):
            stop()
        if getattr(self._loader, "_iterator", None) is not None:
            self._loader._iterator = None
        self._iterator = None
