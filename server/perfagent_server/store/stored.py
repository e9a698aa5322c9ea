"""A frame as everything behind the acknowledgement reads it."""

from __future__ import annotations

from dataclasses import dataclass

from perfagent.wire import Event, Group
from perfagent_server.store.codec.tail import TailGroup

__all__ = ["IMPORTED_SOURCE", "FromTail", "Stored"]

IMPORTED_SOURCE = "import-"
"""The source ids of `perfagent import` begin like this. That command has judged its runs itself."""


@dataclass(frozen=True, slots=True)
class _Frame:
    """One accepted frame. id: position in the tail, increasing; received: server clock, Unix seconds."""

    id: int
    run: str
    attempt: int
    rank: int
    source: str
    seq: int
    received: float

    @property
    def is_imported(self) -> bool:
        return self.source.startswith(IMPORTED_SOURCE)


@dataclass(frozen=True, slots=True)
class Stored(_Frame):
    """As it was just committed: for the live hub and for commands to runs. groups: without what was rejected."""

    groups: list[Group]
    events: list[Event]


@dataclass(frozen=True, slots=True)
class FromTail(_Frame):
    """As it lies in the tail: for the rules."""

    groups: list[TailGroup]
    events: list[Event]
