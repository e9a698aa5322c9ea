"""A run that was read from the files of a tracker or trainer."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from perfagent.wire import Event, Group

__all__ = ["OldRun", "Process", "Reader", "Samples", "Source"]


class Samples:
    """A series in the order of its file: step (whole, 0 and more), time (Unix seconds, NaN where the file knows none) and
    value (float64; NaN and infinities are values)."""

    __slots__ = ("step", "time", "value")

    def __init__(self) -> None:
        self.step, self.time, self.value = array("q"), array("d"), array("d")

    def __len__(self) -> int:
        return len(self.step)

    def add(self, step: int, value: float, time: float = math.nan) -> None:
        self.step.append(step)
        self.time.append(time)
        self.value.append(value)


@dataclass(slots=True)
class Process:
    """What one process reported in one attempt: only our own files tell so much."""

    attempt: int
    rank: int
    groups: list[Group] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)


@dataclass(slots=True)
class OldRun:
    """source: names the run at its origin, the same in each reading, such as `mlflow:3f2a…` or `tensorboard:/logs/a`: an
    import knows it again. state: "" where the files do not tell. started, ended: Unix seconds. series: where a run was
    started again, steps go back. console: its last lines. left_out: sentences for what was not taken. processes: of our own
    files all that each rank reported, whose lowest rank `series` has; else empty."""

    source: str
    name: str
    project: str = ""
    group: str = ""
    tags: list[str] = field(default_factory=list)
    notes: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)
    state: Literal["", "running", "finished", "failed"] = ""
    started: float | None = None
    ended: float | None = None
    series: dict[str, Samples] = field(default_factory=dict)
    console: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    processes: list[Process] = field(default_factory=list)

    def add(self, name: str, step: int, value: float, time: float = math.nan) -> None:
        samples = self.series.get(name)
        if samples is None:
            samples = self.series[name] = Samples()
        samples.add(step, value, time)

    @property
    def points(self) -> int:
        return sum(map(len, self.series.values()))


@dataclass(frozen=True, slots=True)
class Source:
    """Files that hold one run or several. read: from their beginning, each time anew. Raises nothing for damaged files:
    what is wrong stands in `left_out`; OSError for files that are gone."""

    format: str
    paths: tuple[Path, ...]
    read: Callable[[], Iterator[OldRun]]


class Reader(Protocol):
    """A format. Cheap: by names, and by the first bytes of files."""

    def sources(self, folder: Path, files: Sequence[Path]) -> Iterator[Source]:
        """What of it lies in this folder. files: those in it that no reader before has claimed; a reader of folders may
        look below as well, and claims what it names in `paths`."""
        ...
