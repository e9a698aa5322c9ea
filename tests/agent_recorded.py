"""Reads what processes recorded into their PERFAGENT_RECORD folder."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perfagent.delivery.spool import Header, Spool
from perfagent_server.event_data import event_problem


def _sources(folder: Path) -> Iterator[tuple[Header, list[Any]]]:
    """Each process, and its frames. Works on a copy, since reading a spool takes its frames away."""
    with tempfile.TemporaryDirectory() as copy:
        shutil.copytree(folder, copy, dirs_exist_ok=True)
        for source in sorted(Path(copy).iterdir()):
            spool, frames = Spool.open(source, recording=True), []
            while (outgoing := spool.next()) is not None:
                frames.append(outgoing)
                spool.ack(outgoing.seq)
            yield spool.header, frames
            spool.abandon()


class Recording:
    """Everything below a record folder."""

    def __init__(self, folder: Path) -> None:
        self._frames = [frame for _, frames in _sources(folder) for frame in frames]
        wrong = [
            (event, problem) for frame in self._frames for event in frame.events if (problem := event_problem(event))
        ]
        assert not wrong, f"the server would not take what the agent sends: {wrong}"

    def series(self, name: str) -> list[tuple[int, float]]:
        """(step, value), by step."""
        groups = [group for frame in self._frames for group in frame.groups if name in group.values]
        return sorted(pair for group in groups for pair in zip(group.steps(), group.column(name), strict=True))

    def frames(self) -> list[tuple[list[Any], list[Any]]]:
        """Groups and events of each frame."""
        return [(frame.groups, frame.events) for frame in self._frames]

    def names(self) -> set[str]:
        return {name for frame in self._frames for group in frame.groups for name in group.values}

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event.data for frame in self._frames for event in frame.events if event.kind == kind]


@dataclass
class Recorded:
    """One process: who it said it was, its series (name -> step -> value), the states it told, and the time and phases
    of its steps (step -> name -> seconds)."""

    run: str | None
    rank: int
    attempt: int
    series: dict[str, dict[int, float]] = field(default_factory=dict)
    states: list[dict[str, Any]] = field(default_factory=list)
    times: dict[int, dict[str, float]] = field(default_factory=dict)


def recorded(folder: Path) -> list[Recorded]:
    """Every process that recorded into this folder, by rank."""
    return sorted((_told_apart(header, frames) for header, frames in _sources(folder)), key=lambda one: one.rank)


def _told_apart(header: Header, frames: list[Any]) -> Recorded:
    one = Recorded(header.run, header.rank, header.attempt)
    for group in (group for frame in frames for group in frame.groups):
        for name in group.values:
            one.series.setdefault(name, {}).update(zip(group.steps(), group.column(name), strict=True))
        if "step_time_s" in group.values:  # without it: an evaluation after the last step
            timed = [name for name in group.values if name == "step_time_s" or name.startswith("phase/")]
            for step, *seconds in zip(group.steps(), *map(group.column, timed), strict=True):
                one.times[step] = dict(zip(timed, seconds, strict=True))
    one.states += [event.data for frame in frames for event in frame.events if event.kind == "state"]
    return one
