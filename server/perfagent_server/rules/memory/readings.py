"""What the processes of a run, and their hosts, hold in memory now, put together over ranks."""

from __future__ import annotations

from typing import NamedTuple

from perfagent_server.rules.rule import Series
from perfagent_server.rules.window import Window

__all__ = ["OF_HOSTS", "OF_PROCESSES", "Held", "Host", "hosts", "of_processes", "of_workers"]

_NEWEST = 4  # seconds: the lowest of them counts, for memory goes up and down within a step
_WORKERS = ("process/workers_rss_bytes", "process/workers_rss_file_bytes", "process/workers_pss_bytes")
_ENDED_S = 15.0
"""Workers are read every five seconds. Of those that have ended, nothing is sent."""
OF_PROCESSES = (
    *(Series(f"process/{name}", keep=_NEWEST, axis="time", ranks="apart") for name in ("rss_bytes", "rss_file_bytes")),
    *(Series(name, keep=2, axis="time", ranks="apart") for name in _WORKERS),
)
OF_HOSTS = tuple(
    Series(f"host/memory_{name}_bytes", keep=_NEWEST, axis="time", ranks="apart") for name in ("used", "total")
)


class Held(NamedTuple):
    """resident, held: bytes of all ranks, with and without pages of mapped files, which the system takes back when it
    needs them; ranks: how many of them sent readings; second: of the newest, by its sender's clock."""

    resident: float
    held: float
    ranks: int
    second: float


class Host(NamedTuple):
    """Of the node that a rank speaks for, bytes. total: of its control group, where that has a limit."""

    rank: int
    used: float
    total: float


def of_processes(window: Window) -> Held | None:
    """The training processes; None where none sent a reading."""
    resident, mapped = window.readings("process/rss_bytes"), window.readings("process/rss_file_bytes")
    total, held, newest = 0.0, 0.0, 0.0
    for rank in resident.ranks:
        tail = resident.tail(_NEWEST, rank)
        of_files = dict(mapped.tail(_NEWEST, rank))
        total += tail[-1][1]
        held += min(
            (size - of_files.get(second, 0.0) for second, size in tail if not of_files or second in of_files),
            default=tail[-1][1],
        )
        newest = max(newest, tail[-1][0])
    return Held(total, held, len(resident.ranks), newest) if resident.ranks else None


def of_workers(window: Window) -> Held | None:
    """The loaders' workers; None where there were none so far. What forked workers copy page by page shows only in
    their own memory, where that is sent: seldom."""
    resident, mapped, own = (window.readings(name) for name in _WORKERS)
    processes = window.readings("process/rss_bytes")
    total, held, newest = 0.0, 0.0, 0.0
    for rank in resident.ranks:
        second, size = resident.tail(1, rank)[0]
        now = processes.tail(1, rank)
        if now and now[-1][0] - second > _ENDED_S:
            continue
        total += size
        of_its_own = own.newest(rank)
        held += size - (mapped.newest(rank) or 0.0) if of_its_own is None else of_its_own
        newest = max(newest, second)
    return Held(total, held, len(resident.ranks), newest) if resident.ranks else None


def hosts(window: Window) -> list[Host]:
    """One for each node that told its memory."""
    used, total = (window.readings(one.name) for one in OF_HOSTS)
    lowest = {rank: min(value for _, value in used.tail(_NEWEST, rank)) for rank in used.ranks}
    return [Host(rank, low, size) for rank, low in lowest.items() if (size := total.newest(rank))]
