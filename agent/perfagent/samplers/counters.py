"""What the readers of host and processes need from the system. A counter that the system does not have is None."""

from __future__ import annotations

from typing import NamedTuple, Protocol

__all__ = [
    "CpuTime", "Disks", "HostCounters", "Links", "Memory", "ProcessCounters", "Resident", "WorkerCounters",
]  # fmt: skip


class CpuTime(NamedTuple):
    """Time of all processors since the start of the system, in one unit. waiting: for disks, while idle."""

    idle: float
    waiting: float | None
    total: float


class Memory(NamedTuple):
    """Bytes."""

    total: int
    available: int


class Disks(NamedTuple):
    """Bytes since the start of the system, and for each disk the milliseconds in which it was busy."""

    read: int
    written: int
    busy_ms: list[int] | None


class Links(NamedTuple):
    """Bytes through the network since the start of the system."""

    received: int
    sent: int


class Resident(NamedTuple):
    """Bytes of a process that are in memory. of_files: those of them that are pages of mapped files, which the system
    takes back when memory is short; None where that is not told."""

    total: int
    of_files: int | None


class HostCounters(Protocol):
    def cpu(self) -> CpuTime | None: ...
    def memory(self) -> Memory | None: ...
    def disks(self) -> Disks | None: ...
    def links(self) -> Links | None: ...
    def close(self) -> None: ...


class ProcessCounters(Protocol):
    """Of this process."""

    def resident(self) -> Resident | None: ...
    def threads(self) -> int | None: ...

    def disk(self) -> tuple[int, int] | None:
        """Bytes that it really read from disks and wrote there; hits in the page cache do not count."""

    def close(self) -> None: ...


class WorkerCounters(Protocol):
    """Of processes that this one started."""

    def of(self, pid: int) -> tuple[float, Resident] | None:
        """CPU seconds and memory; None for a process that has ended."""

    def keep(self, pids: set[int]) -> None:
        """Forgets every process but these."""

    def close(self) -> None: ...
