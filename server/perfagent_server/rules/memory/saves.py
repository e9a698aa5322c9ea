"""The checkpoints that a run has saved so far."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from perfagent_server.rules.rule import Series
from perfagent_server.rules.window import Window

__all__ = ["FILE_BYTES", "SAVED_BYTES", "SAVES", "SAVE_S", "Save", "follow_saves"]

SAVES = Series("phase/checkpoint_s", merge="median")
SAVED_BYTES = Series("checkpoint/saved_bytes", keep=64, merge="max")
"""From perfagent's own Checkpoint, as is the next: when a save is there, also one that was written beside the training."""
SAVE_S = Series("checkpoint/save_s", keep=16, merge="max")
FILE_BYTES = Series("checkpoint/file_bytes", keep=64, merge="max")  # of what torch.save and others wrote
_MOST = 24


class Save(NamedTuple):
    """time: when it was heard of, Unix seconds, server clock; seconds: for which the training waited, 0 where none
    did."""

    step: int
    time: float
    seconds: float


def follow_saves(window: Window, state: dict[str, Any]) -> tuple[int, list[Save]]:
    """How many saves this attempt has made, and the newest of them, oldest first. state: a rule's own, {} at first.

    Several files that are written in steps beside each other are one save.
    """
    rows: list[list[Any]] = state.setdefault("saves", [])
    state.setdefault("count", 0)
    newest = rows[-1][0] if rows else -1
    if all(
        track is None or track.steps[-1] <= newest
        for track in (window.series(SAVES.name), window.series(SAVED_BYTES.name))
    ):
        return state["count"], [Save(*row) for row in rows]
    for step, seconds in sorted(_of_steps(window).items()):
        if rows and step <= rows[-1][0]:
            continue
        if rows and step - rows[-1][0] == 1:
            rows[-1] = [step, rows[-1][1], rows[-1][2] + seconds]
            continue
        rows.append([step, window.now, seconds])
        state["count"] += 1
    del rows[:-_MOST]
    return state["count"], [Save(*row) for row in rows]


def _of_steps(window: Window) -> Mapping[int, float]:
    """Seconds by step, of the steps in which something was saved."""
    found: dict[int, float] = {}
    for name in (SAVES.name, SAVED_BYTES.name):
        track = window.series(name)
        for step, value in zip(track.steps, track.values, strict=True) if track is not None else ():
            if 0 < value < math.inf:
                found[step] = max(found.get(step, 0.0), value if name == SAVES.name else 0.0)
    return found
