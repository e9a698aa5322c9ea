"""Frames as an agent would send them, for tests of whatever stands behind the wire."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from perfagent.wire import Event, Frame, Group

BEGIN = 1_790_000_000.0  # Unix seconds at which these runs start

__all__ = ["BEGIN", "frame", "rows", "state"]


def rows(values: Mapping[str, Sequence[float]], steps: Sequence[int], times: Sequence[float] | None = None) -> Group:
    """One group: each name has one value a step; a step takes a quarter of a second unless `times` says otherwise."""
    clock = [BEGIN + 0.25 * step for step in steps] if times is None else list(times)
    return Group(list(steps), clock, [time - BEGIN for time in clock], dict(values))  # type: ignore[arg-type]


def state(kind: str, /, *, time: float = BEGIN, step: int | None = None, **data: Any) -> Event:
    return Event(kind="state", time=time, step=step, data={"state": kind, **data})


def frame(
    seq: int,
    *pieces: Group | Event,
    run: str = "r1",
    rank: int = 0,
    attempt: int = 1,
    source: str | None = None,
    sent: float | None = None,
    name: str | None = None,
    **more: Any,
) -> Frame:
    """Frame `seq` of a source, by default the only one of this rank and attempt."""
    return Frame(
        project="p",
        run=run,
        source=source or f"{run}-{attempt}-{rank}",
        attempt=attempt,
        rank=rank,
        seq=seq,
        groups=[piece for piece in pieces if isinstance(piece, Group)],
        events=[piece for piece in pieces if isinstance(piece, Event)],
        sent=sent,
        name=name,
        **more,
    )
