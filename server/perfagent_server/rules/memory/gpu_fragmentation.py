"""gpu_fragmentation: the caching allocator holds far more of the GPU than tensors ever needed at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from perfagent.wire import Finding
from perfagent_server.rules.evidence import where
from perfagent_server.rules.rule import Every, Life, Question, Rule, Series
from perfagent_server.rules.window import Window

__all__ = ["GpuFragmentation"]

_SERIES = (
    "cuda/reserved_bytes", "cuda/peak_allocated_bytes", "cuda/inactive_split_bytes", "cuda/alloc_retries",
    "gpu/memory_total_bytes",
)  # fmt: skip


class _Device(NamedTuple):
    """Of a rank, bytes. peak: the most that tensors held at once, in the whole run; split: free parts of blocks in
    use."""

    rank: int
    reserved: float
    peak: float
    split: float
    retries: float
    total: float

    @property
    def times(self) -> float:
        return self.reserved / self.peak


@dataclass(frozen=True, kw_only=True)
class GpuFragmentation(Rule):
    """Reserved memory that fits nothing (TraceML's overhang).

    The peak of the whole run counts, not what is allocated now: between steps, and after an evaluation with larger batches, a
    healthy cache holds several times what is in use.
    """

    times: float = 2.0
    reserved_pct: float = 30.0
    full_times: float = 1.25
    full_pct: float = 85.0
    skip_steps: int = 20

    id = "gpu_fragmentation"
    severities = ("info", "warning")
    question = Question.WILL_IT_GO_ON
    after = ("rank_memory_imbalance",)
    reads = (Every(15.0), *(Series(name, keep=2, axis="time", ranks="apart") for name in _SERIES))
    needs_card = True
    charts = ("cuda/fragmentation", "cuda/reserved_bytes")
    life = Life(for_s=60.0, clear_s=60.0, restated=True)

    def judge(self, window: Window) -> Finding | None:
        if "cuda/peak_allocated_bytes" not in window.by_time or window.step - window.start_step <= self.skip_steps:
            return None
        devices = _devices(window)
        scattered = [device for device in devices if self._is_scattered(device)]
        if not scattered:
            return None
        worst = max(scattered, key=lambda device: device.reserved - device.peak)
        is_full = any(self._is_full(device) for device in scattered)
        ranks = [device.rank for device in scattered]
        return self.found(
            "warning" if is_full else "info",
            since_step=window.step,
            ranks=ranks,
            evidence={
                "rank": worst.rank, "reserved_bytes": worst.reserved, "peak_allocated_bytes": worst.peak,
                "inactive_split_bytes": worst.split, "alloc_retries": worst.retries, "total_bytes": worst.total,
                "times": worst.times, "lost_bytes": worst.reserved - worst.peak, "retries": round(worst.retries) or None,
                **where(window, ranks),
            },
        )  # fmt: skip

    def _is_scattered(self, device: _Device) -> bool:
        is_much = 100 * device.reserved >= self.reserved_pct * device.total
        return self._is_full(device) or (device.times >= self.times and is_much)

    def _is_full(self, device: _Device) -> bool:
        is_full = 100 * device.reserved >= self.full_pct * device.total
        return is_full and device.times >= self.full_times and device.retries > 0


def _devices(window: Window) -> list[_Device]:
    known = [window.readings(name) for name in _SERIES]
    devices = [_Device(rank, *(one.newest(rank) or 0.0 for one in known)) for rank in known[0].ranks]
    return [one for one in devices if one.reserved and one.peak and one.total]
