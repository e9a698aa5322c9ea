"""What this process itself uses of a GPU, by /proc/self/fdinfo, with the keys of the kernel's
Documentation/gpu/drm-usage-stats.rst. Of ROCm's work, which does not pass through the kernel, there is no engine time.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from perfagent.samplers.gpu.board import place

__all__ = ["DrmClients"]

EVERY_S = 5.0
_ENGINES = ("render", "compute", "gfx", "rcs", "ccs")
"""Engines that compute, by their names in i915, amdgpu and xe."""
_UNITS = {"KiB": 1024, "MiB": 1024**2}


class DrmClients:
    """`read(now)` gives what is due; now: monotonic seconds. pci: address of the board; process: our folder in /proc.
    is_utilization: the busiest engine's time stands for the board's utilization, too."""

    def __init__(self, pci: str, process: Path, *, is_utilization: bool) -> None:
        self._place, self._process, self._is_utilization = place(pci), process, is_utilization
        self._next = 0.0
        self._engines: dict[tuple[str, str], tuple[float, float]] = {}

    def read(self, now: float) -> dict[str, float]:
        """process_memory_bytes and process_utilization_pct, as far as the driver gives them."""
        if now < self._next:
            return {}
        self._next = now + EVERY_S
        clients, values = self._clients(), {}
        sizes = [size for fields in clients.values() if (size := _memory(fields)) is not None]
        if sizes:
            values["process_memory_bytes"] = sum(sizes)
        busy = self._busy(clients, now)
        if busy is not None:
            values["process_utilization_pct"] = busy
            if self._is_utilization:
                values["utilization_pct"] = busy
        return values

    def _clients(self) -> dict[str, dict[str, str]]:
        """The fields of each client of the board, by its id: several descriptors may be of one client."""
        clients: dict[str, dict[str, str]] = {}
        with contextlib.suppress(OSError):
            for number in os.listdir(self._process / "fd"):  # noqa: PTH208 - names, and no objects for hundreds of them
                with contextlib.suppress(OSError):  # closed meanwhile
                    if os.readlink(f"{self._process}/fd/{number}").startswith("/dev/dri/"):  # noqa: PTH115 - likewise
                        text = (self._process / "fdinfo" / number).read_text(encoding="ascii", errors="replace")
                        pairs = (line.partition(":") for line in text.splitlines())
                        fields = {key: value.strip() for key, _, value in pairs}
                        if place(fields.get("drm-pdev", "")) == self._place:
                            clients[fields.get("drm-client-id", number)] = fields
        return clients

    def _busy(self, clients: dict[str, dict[str, str]], now: float) -> float | None:
        """Percent of the time since the last call, of the engine that computed most of it."""
        before, self._engines = self._engines, {}
        shares: dict[str, float] = {}
        for client, fields in clients.items():
            for engine in _ENGINES:
                count, total = _number(fields, f"drm-cycles-{engine}"), _number(fields, f"drm-total-cycles-{engine}")
                if count is None or total is None:
                    count, total = _number(fields, f"drm-engine-{engine}"), now * 1e9
                if count is None:
                    continue
                last, then = before.get((client, engine), (count, total))
                count = max(count, last)  # it may fall behind for a while
                self._engines[client, engine] = count, total
                if total > then:
                    share = 100.0 * (count - last) / (total - then)
                    share /= _number(fields, f"drm-engine-capacity-{engine}") or 1.0
                    shares[engine] = shares.get(engine, 0.0) + share
        return min(100.0, max(shares.values())) if shares else None


def _memory(fields: dict[str, str]) -> float | None:
    """Bytes of the device's own memory; of the three keys the first that the driver knows."""
    for key in ("drm-resident-", "drm-memory-", "drm-total-"):
        sizes = [_number(fields, name) for name in fields if name.startswith((key + "vram", key + "local"))]
        if sizes and None not in sizes:
            return sum(size or 0.0 for size in sizes)
    return None


def _number(fields: dict[str, str], name: str) -> float | None:
    number, _, unit = fields.get(name, "").partition(" ")
    return float(number) * _UNITS.get(unit, 1) if number.isdigit() else None
