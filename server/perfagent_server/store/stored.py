"""A frame as everything behind the acknowledgement reads it: the live hub, the rules, commands to runs."""

from __future__ import annotations

from dataclasses import dataclass

from perfagent.wire import Event, Group

__all__ = ["Stored"]


@dataclass(frozen=True, slots=True)
class Stored:
    """One accepted frame, as everything behind the ack (live hub, rules) reads it. id: position in the tail,
    increasing; received: server clock, Unix seconds; groups: without what was rejected, with their times as monotonic
    times where they come from the tail."""

    id: int
    run: str
    attempt: int
    rank: int
    source: str
    seq: int
    received: float
    groups: list[Group]
    events: list[Event]
