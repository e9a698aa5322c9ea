"""Cuts a large frame into pieces of consecutive steps. Readers of the tail then take one piece at a time, and the rules can judge
other runs between two pieces."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from perfagent.wire import Event, Group
from perfagent_server.store.write.lifecycle import ENDED

__all__ = ["MOST_ROWS", "picked", "pieces"]

MOST_ROWS = 2048
"""The rules take some tenths of a second for so many. A live agent sends some tens at once."""

Piece = tuple[Sequence[Group], Sequence[Event]]


def pieces(groups: Sequence[Group], events: Sequence[Event]) -> list[Piece]:
    """Of about MOST_ROWS rows each, in the order of their steps; rows of one step stay together. An event goes with its step,
    one without with the first piece, and what ends the process with the last."""
    if sum(group.rows for group in groups) <= MOST_ROWS:
        return [(groups, events)]
    steps = [np.frombuffer(group.step, "<i8") for group in groups]
    begins = np.unique(np.sort(np.concatenate(steps))[MOST_ROWS::MOST_ROWS])
    places = [np.searchsorted(begins, one, side="right") for one in steps]
    said = [_place(event, begins.tolist()) for event in events]
    return [
        (
            [picked(group, here) for group, place in zip(groups, places, strict=True) if (here := place == at).any()],
            [event for event, place in zip(events, said, strict=True) if place == at],
        )
        for at in range(len(begins) + 1)
    ]


def _place(event: Event, begins: Sequence[int]) -> int:
    if event.kind == "state" and event.data.get("state") in ENDED:
        return len(begins)
    return sum(begin <= (event.step or 0) for begin in begins)


def picked(group: Group, keep: npt.NDArray[np.bool_]) -> Group:
    """The rows of a group that a mask keeps."""

    def kept(column: bytes) -> bytes:
        return bytes(np.frombuffer(column, f"V{len(column) // len(keep)}")[keep].tobytes())

    values = {name: kept(column) for name, column in group.values.items()}
    return Group(kept(group.step), kept(group.time), kept(group.monotonic), values)
