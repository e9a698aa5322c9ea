"""What this process itself uses of a GPU, and what others on the same GPU use.

The driver's list of processes takes milliseconds under a lock that launches need too. In a container the driver may give the
host's process ids: where our own is not among them, nothing is reported.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from perfagent.samplers.gpu.nvml import Door

__all__ = ["Processes"]

MEMORY_EVERY_S = 30.0
UTILIZATION_EVERY_S = 5.0


class Processes:
    """`read(now)` gives what is due; now: monotonic seconds. pids: by which numbers this process may go."""

    def __init__(self, door: Door, handle: object, pids: frozenset[int] | None = None) -> None:
        self._door, self._handle = door, handle
        self._pids = pids if pids is not None else _own()
        self._memory_at = self._utilization_at = 0.0
        self._seen = 0
        self._listed = False

    def read(self, now: float) -> dict[str, float]:
        """process_memory_bytes, other_memory_bytes, other_processes, process_utilization_pct, as far as the driver
        gives them."""
        values: dict[str, float] = {}
        if now >= self._memory_at:
            self._memory_at = now + MEMORY_EVERY_S
            self._memory(values)
        if now >= self._utilization_at:
            self._utilization_at = now + UTILIZATION_EVERY_S
            self._utilization(values)
        return values

    def _memory(self, values: dict[str, float]) -> None:
        running = self._door.ask("nvmlDeviceGetComputeRunningProcesses", self._handle)
        if running is None:
            return
        mine = [one for one in running if one.pid in self._pids]
        if not mine:  # not started on this GPU yet, or its ids are those of another namespace
            return
        others = [one for one in running if one.pid not in self._pids]
        values["other_processes"] = float(len({one.pid for one in others}))
        for name, group in (("process_memory_bytes", mine), ("other_memory_bytes", others)):
            used = [one.usedGpuMemory for one in group]
            if None not in used:
                values[name] = float(sum(used))

    def _utilization(self, values: dict[str, float]) -> None:
        samples = self._door.ask("nvmlDeviceGetProcessUtilization", self._handle, self._seen, nothing=())
        if samples is None:
            return
        since, self._seen = self._seen, max([self._seen, *(int(one.timeStamp) for one in samples)])
        mine = [one for one in samples if one.pid in self._pids]
        self._listed = self._listed or bool(mine)
        valid = [float(one.smUtil) for one in mine if one.timeStamp > since and one.smUtil <= 100]
        if valid:
            values["process_utilization_pct"] = sum(valid) / len(valid)
        elif self._listed and not mine:  # a process whose kernels did not run is not among the samples
            values["process_utilization_pct"] = 0.0


def _own() -> frozenset[int]:
    """Our process id here, and in the namespaces around us that the kernel shows."""
    pids = {os.getpid()}
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("NSpid:"):
                pids.update(int(word) for word in line.split()[1:])
    return frozenset(pids)
