"""Counters of the host and its processes from psutil, for systems without /proc (macOS, BSD)."""

from __future__ import annotations

import psutil

from perfagent.samplers.proc_counters import CpuTime, Disks, Links, Memory, Resident

__all__ = ["PsutilCounters"]


class PsutilCounters:
    """Has the methods of ProcHost, ProcProcess and ProcWorkers; None for what it does not count."""

    def cpu(self) -> CpuTime | None:
        found = psutil.cpu_times()
        parts = ("user", "nice", "system", "idle", "irq", "softirq", "steal")  # guests are part of user and nice
        return CpuTime(found.idle, None, sum(getattr(found, part, 0.0) for part in parts))

    def memory(self) -> Memory | None:
        found = psutil.virtual_memory()
        return Memory(found.total, found.available)

    def disks(self) -> Disks | None:
        return None

    def links(self) -> Links | None:
        return None

    def resident(self) -> Resident | None:
        return Resident(int(psutil.Process().memory_info().rss), None)

    def threads(self) -> int | None:
        return int(psutil.Process().num_threads())

    def disk(self) -> tuple[int, int] | None:
        return None

    def of(self, pid: int) -> tuple[float, Resident] | None:
        """CPU seconds and memory of a process that this one started; None if it has ended."""
        try:
            process = psutil.Process(pid)
            cpu, resident = process.cpu_times(), int(process.memory_info().rss)
        except psutil.Error:
            return None
        return (cpu.user + cpu.system, Resident(resident, None)) if resident else None  # a zombie holds no memory

    def keep(self, pids: set[int]) -> None: ...
