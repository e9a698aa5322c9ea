"""Decides whether a frame may be stored where it says: a source is one process for ever, and a key of one project keeps
to its runs.

A source that speaks for a second run, attempt or rank would be lost in silence: (source, seq) says what was here
before, and the source's row says whose state it is. A run may move to another project, by a later attach(project=...)
or a new start, but only by senders that may write to both.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from perfagent.wire import Frame
from perfagent_server.store.interface import Refused

__all__ = ["refusals"]


def refusals(
    frames: Sequence[Frame],
    sources: Mapping[str, Mapping[str, Any]],
    runs: Mapping[str, Mapping[str, Any]],
    limited: Collection[int],
) -> dict[int, Refused]:
    """Positions of frames that are not stored. sources, runs: rows that exist; limited: positions of frames whose key
    may send to their own project only."""
    processes = {source: (row["run"], row["attempt"], row["rank"]) for source, row in sources.items()}
    projects = {run: row["project"] for run, row in runs.items()}
    refused: dict[int, Refused] = {}
    for at, frame in enumerate(frames):
        process = (frame.run, frame.attempt, frame.rank)
        if at in limited and projects.get(frame.run, frame.project) != frame.project:
            refused[at] = _of_another_project(frame)
        elif processes.get(frame.source, process) != process:
            refused[at] = _of_another_process(frame, None if at in limited else processes[frame.source])
        else:
            processes[frame.source] = process
            projects.setdefault(frame.run, frame.project)
    return refused


def _of_another_project(frame: Frame) -> Refused:
    message = f"run {frame.run[:80]!r} belongs to another project than {frame.project[:80]!r}, the only one this key may send to"
    return Refused("forbidden", f"{message}: choose another run id", "project")


def _of_another_process(frame: Frame, known: tuple[str, int, int] | None) -> Refused:
    """The source id is in use by another process. known: that process's run, attempt and rank; None for a sender whose
    key is limited to a project, since the other process may belong to another project."""
    whose = f"run {known[0]}, attempt {known[1]}, rank {known[2]}" if known else "another process"
    message = f"source {frame.source} is known as {whose}; each process of each attempt needs an id of its own"
    return Refused("source_in_use", message, "source")
