"""The counters of this system: /proc where there is one (proc_counters.py), psutil elsewhere, as on macOS
(psutil_counters.py)."""

from __future__ import annotations

from pathlib import Path

from perfagent.samplers.counters import HostCounters, ProcessCounters, WorkerCounters

__all__ = ["of_system"]


def of_system(proc: Path = Path("/proc")) -> tuple[HostCounters, ProcessCounters, WorkerCounters]:
    if (proc / "stat").exists():
        from perfagent.samplers.proc_counters import ProcHost, ProcProcess, ProcWorkers

        return ProcHost(proc), ProcProcess(proc / "self"), ProcWorkers(proc)
    from perfagent.samplers.psutil_counters import PsutilHost, PsutilProcess, PsutilWorkers

    return PsutilHost(), PsutilProcess(), PsutilWorkers()
