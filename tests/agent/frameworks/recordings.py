"""What each process of a job recorded, told apart by rank."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perfagent.delivery.spool import Spool


@dataclass
class Recorded:
    """One process: who it said it was, its series (name -> step -> value) and the states it told."""

    run: str | None
    rank: int
    attempt: int
    series: dict[str, dict[int, float]]
    states: list[dict[str, Any]]


def recorded(folder: Path) -> list[Recorded]:
    """Every process that recorded into this folder, by rank. Works on a copy: reading a spool takes its frames away."""
    with tempfile.TemporaryDirectory() as copy:
        shutil.copytree(folder, copy, dirs_exist_ok=True)
        return sorted((_read(source) for source in Path(copy).iterdir()), key=lambda one: one.rank)


def _read(source: Path) -> Recorded:
    spool = Spool.open(source, recording=True)
    series: dict[str, dict[int, float]] = {}
    states = []
    while (outgoing := spool.next()) is not None:
        for group in outgoing.groups:
            for name in group.values:
                series.setdefault(name, {}).update(zip(group.steps(), group.column(name), strict=True))
        states += [event.data for event in outgoing.events if event.kind == "state"]
        spool.ack(outgoing.seq)
    header = spool.header
    spool.abandon()
    return Recorded(header.run, header.rank, header.attempt, series, states)
