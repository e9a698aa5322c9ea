"""What each process of a job recorded, told apart by rank."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perfagent.delivery.spool import Spool


@dataclass
class Recorded:
    """One process: who it said it was, its series (name -> step -> value), the states it told, and the time and phases of its
    steps (step -> name -> seconds)."""

    run: str | None
    rank: int
    attempt: int
    series: dict[str, dict[int, float]]
    states: list[dict[str, Any]]
    times: dict[int, dict[str, float]] = field(default_factory=dict)


def recorded(folder: Path) -> list[Recorded]:
    """Every process that recorded into this folder, by rank. Works on a copy: reading a spool takes its frames away."""
    with tempfile.TemporaryDirectory() as copy:
        shutil.copytree(folder, copy, dirs_exist_ok=True)
        return sorted((_read(source) for source in Path(copy).iterdir()), key=lambda one: one.rank)


def _read(source: Path) -> Recorded:
    spool = Spool.open(source, recording=True)
    series: dict[str, dict[int, float]] = {}
    times: dict[int, dict[str, float]] = {}
    states = []
    while (outgoing := spool.next()) is not None:
        for group in outgoing.groups:
            for name in group.values:
                series.setdefault(name, {}).update(zip(group.steps(), group.column(name), strict=True))
            if "step_time_s" in group.values:  # without it: an evaluation after the last step
                timed = [name for name in group.values if name == "step_time_s" or name.startswith("phase/")]
                for step, *seconds in zip(group.steps(), *map(group.column, timed), strict=True):
                    times[step] = dict(zip(timed, seconds, strict=True))
        states += [event.data for event in outgoing.events if event.kind == "state"]
        spool.ack(outgoing.seq)
    header = spool.header
    spool.abandon()
    return Recorded(header.run, header.rank, header.attempt, series, states, times)
