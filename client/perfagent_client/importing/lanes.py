"""Splits an old run into lanes: groups of columns that only grow at their end. The number of rows sent tells how much of a lane
the server has."""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from perfagent.wire import Group
from perfagent_client.history.old_run import OldRun, Samples
from perfagent_client.importing.attempts import Attempts

__all__ = ["Lane", "lanes"]


@dataclass(frozen=True, slots=True)
class Lane:
    """Of one process in one attempt. key: the same at each import; it does not show the name of the
    series. time: Unix seconds, finite."""

    key: str
    attempt: int
    rank: int
    group: Group

    @property
    def rows(self) -> int:
        return self.group.rows

    def cut(self, first: int, end: int) -> Group:
        """The rows first..end, without the last."""
        whole, rows = self.group, self.rows
        if (first, end) == (0, rows):
            return whole
        step, time = (column[8 * first : 8 * end] for column in (whole.step, whole.time))
        values = {
            name: column[first * width : end * width]
            for name, column in whole.values.items()
            for width in (len(column) // rows,)
        }
        return Group(step, time, time, values)


def lanes(run: OldRun, written: float) -> list[Lane]:
    """written: the time of samples whose files know none, Unix seconds."""
    if run.processes:
        return [
            Lane(f"{process.attempt}/{process.rank}/{number}", process.attempt, process.rank, group)
            for process in run.processes
            for number, group in enumerate(process.groups)
            if group.rows
        ]
    series = {name: samples for name, samples in run.series.items() if len(samples)}
    attempts = Attempts(series) if series else None
    return [
        Lane(_key(attempt, name), attempt, 0, _group(name, part, written))
        for name, samples in series.items()
        if attempts is not None
        for attempt, part in _by_attempt(samples, attempts)
    ]


def _key(attempt: int, name: str) -> str:
    return hashlib.blake2b(f"{attempt}/{name}".encode(errors="replace"), digest_size=8).hexdigest()


def _by_attempt(samples: Samples, attempts: Attempts) -> Iterator[tuple[int, Samples]]:
    if attempts.count == 1:
        yield 1, samples
        return
    parts: dict[int, Samples] = {}
    for attempt, step, value, time in zip(attempts.of(samples), samples.step, samples.value, samples.time, strict=True):
        parts.setdefault(attempt, Samples()).add(step, value, time)
    yield from sorted(parts.items())


def _group(name: str, samples: Samples, written: float) -> Group:
    time = _known(samples.time, written)
    return Group(samples.step.tobytes(), time, time, {name: samples.value.tobytes()})


def _known(times: Sequence[float], written: float) -> bytes:
    if math.isfinite(sum(times)):
        return array("d", times).tobytes()
    return array("d", (time if math.isfinite(time) else written for time in times)).tobytes()
