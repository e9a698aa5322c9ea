"""link_errors: a link of a GPU (NVLink, PCIe) has errors, or runs below what it ran at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from perfagent.wire import Finding
from perfagent_server.rules.hardware.counters import CounterRule, Trouble, follow_gains
from perfagent_server.rules.rule import Every, Life, Series, within
from perfagent_server.rules.window import Window

__all__ = ["LinkErrors"]

_NVLINK = {
    "gpu/nvlink_recovery_errors": "recovery",
    "gpu/nvlink_replay_errors": "replay",
    "gpu/nvlink_crc_data_errors": "data",
    "gpu/nvlink_crc_flit_errors": "flit",
}
_REPLAYS = "gpu/pcie_replays"
_SPEED = {"gpu/pcie_link_width": "PCIe lanes", "gpu/pcie_link_generation": "PCIe generation"}
_BUSY = "gpu/utilization_min_pct"
_READINGS = 12  # one in ten seconds


@dataclass(frozen=True, kw_only=True)
class LinkErrors(CounterRule):
    """Any NVLink error counts, as in Meta's gcm; replays_per_min is DCGM's limit. An idle PCIe link slows down to save power,
    so its speed counts only while the device is busy.
    """

    nvlink_errors: float = 1.0
    replays_per_min: float = 8.0
    readings: int = within(3, least=2, most=_READINGS)
    busy_pct: float = 30.0

    id = "link_errors"
    severities = ("warning",)
    after = ("lost_contact",)
    reads = (
        Every(10.0),
        *(Series(name, keep=2, axis="time", ranks="apart") for name in _NVLINK),
        *(Series(name, keep=_READINGS, axis="time", ranks="apart") for name in (_REPLAYS, *_SPEED)),
        Series(_BUSY, keep=10 * _READINGS // 4, axis="time", ranks="apart"),
    )
    charts = ("gpu/pcie_replays", "gpu/nvlink_crc_data_errors")
    life = Life(for_s=10.0, clear_s=120.0, restated=True)

    def judge(self, window: Window) -> Finding | None:
        if window.by_time.keys().isdisjoint((*_NVLINK, _REPLAYS, *_SPEED)):
            return None
        state = window.state_of(self, {})
        gains = follow_gains(window, state, _NVLINK)
        found = [*self._of_nvlink(gains), *self._replays(window), *self._slower(window, state)]
        return self.worst(window, found, window.step, gains)

    def _of_nvlink(self, gains: dict[str, dict[int, float]]) -> list[Trouble]:
        found = []
        for name, what in _NVLINK.items():
            ranks = sorted(rank for rank, gain in gains.get(name, {}).items() if gain >= self.nvlink_errors)
            if ranks:
                figures = {"kind": "NVLink", "errors": what, "number": round(max(gains[name].values()))}
                found.append(Trouble("warning", "", ranks, figures))
        return found

    def _replays(self, window: Window) -> list[Trouble]:
        """Over the newest two minutes, and one at least."""
        readings = window.readings(_REPLAYS)
        rates: dict[int, float] = {}
        for rank in readings.ranks:
            seconds, counts = zip(*readings.tail(_READINGS, rank), strict=True)
            lasted = seconds[-1] - seconds[0]
            if lasted >= 60 and [*counts] == sorted(counts):  # else it was reset meanwhile
                rates[rank] = 60 * (counts[-1] - counts[0]) / lasted
        ranks = sorted(rank for rank, rate in rates.items() if rate >= self.replays_per_min)
        if not ranks:
            return []
        return [Trouble("warning", "PCIe", ranks, {"kind": "PCIe replays", "per_min": max(rates.values())})]

    def _slower(self, window: Window, state: dict[str, Any]) -> list[Trouble]:
        found = []
        for name, kind in _SPEED.items():
            readings, busy = window.readings(name), window.readings(_BUSY)
            best: dict[str, float] = state.setdefault(name, {})
            slow: dict[int, float] = {}
            for rank in readings.ranks:
                tail = [value for _, value in readings.tail(self.readings, rank)]
                best[str(rank)] = max(best.get(str(rank), 0.0), *tail)
                used = [value for _, value in busy.tail(10 * _READINGS // 4, rank)]
                is_busy = bool(used) and sum(used) / len(used) >= self.busy_pct
                if len(tail) == self.readings and max(tail) < best[str(rank)] and is_busy:
                    slow[rank] = tail[-1]
            if slow:
                rank = min(slow, key=lambda one: slow[one])
                figures = {"kind": kind, "now": slow[rank], "before": best[str(rank)]}
                found.append(Trouble("warning", "PCIe", sorted(slow), figures))
        return found
