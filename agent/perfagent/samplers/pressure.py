"""Pressure stall information: the share of time in which at least one task waited for a processor, for memory or for a
disk.

CPU and memory in use say how full a host is; this says whether anybody had to wait for it. The kernel adds up
microseconds, so a reading every few seconds misses nothing in between. Kernels without it (before 4.20, or started with
psi=0) report nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from perfagent.samplers.kernel_file import KernelFile

__all__ = ["RESOURCES", "PressureReader"]

RESOURCES = ("cpu", "memory", "io")
_STALLED = re.compile(rb"^some .*\btotal=(\d+)", re.MULTILINE)
"""Microseconds. The averages beside it are over spans of the kernel's own."""


class PressureReader:
    """`read(values, now)` adds `host/<resource>_pressure_pct`; the first reading has none. now: monotonic seconds.

    group: resource -> file of the control group that counts for it. What has none is read of the whole host.
    """

    def __init__(self, group: Mapping[str, Path], proc: Path = Path("/proc")) -> None:
        self._files = {name: KernelFile(group.get(name, proc / "pressure" / name), 256) for name in RESOURCES}
        self._before: dict[str, tuple[float, int]] = {}

    def read(self, values: dict[str, float], now: float) -> None:
        for name, file in self._files.items():
            found = _STALLED.search(file.read() or b"")
            if found is None:
                continue
            stalled = int(found[1])
            before, self._before[name] = self._before.get(name), (now, stalled)
            if before is not None and now > before[0] and stalled >= before[1]:
                share = 1e-6 * (stalled - before[1]) / (now - before[0])
                # the two clocks are read at different moments
                values[f"host/{name}_pressure_pct"] = 100.0 * min(1.0, share)

    def close(self) -> None:
        for file in self._files.values():
            file.close()
