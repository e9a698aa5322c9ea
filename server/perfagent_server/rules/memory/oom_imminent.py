"""oom_imminent: memory is about to run out, of a GPU or of a host."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from perfagent.wire import Finding
from perfagent_server.rules.memory.growth import Growth, Track
from perfagent_server.rules.memory.readings import OF_HOSTS, OF_PROCESSES, Host, hosts, of_processes, of_workers
from perfagent_server.rules.rule import UNKNOWN, Every, Life, Question, Rule, Series, Unknown
from perfagent_server.rules.window import Window

__all__ = ["OomImminent"]

_PEAK_OF_S = 60  # readings, one a second: the peak of a step falls between most of them
_PER_GPU = (
    "cuda/reserved_bytes", "cuda/allocated_bytes", "cuda/headroom_bytes", "cuda/alloc_retries", "gpu/memory_used_bytes",
    "gpu/memory_total_bytes",
)  # fmt: skip
_LASTED = 1 / 40  # of the time that may be left: for so long a rise must have lasted
_CONTEXT_BYTES = 2.0**30  # of CUDA and its libraries: ours, too
_Level = Literal["info", "warning", "critical"]


class _Gpu(NamedTuple):
    """Of a rank's device, bytes. taken: by all, caches included; live: what would not be given up before an
    out-of-memory error, at the peak of the newest minute."""

    rank: int
    total: float
    taken: float
    live: float

    @property
    def taken_pct(self) -> float:
        return 100 * self.taken / self.total

    @property
    def live_pct(self) -> float:
        return 100 * self.live / self.total

    @property
    def figures(self) -> dict[str, Any]:
        return {
            "memory": "gpu", "total_bytes": self.total, "taken_bytes": self.taken, "live_bytes": self.live,
            "live_pct": self.live_pct, "taken_pct": self.taken_pct, "free_bytes": self.total - self.live,
        }  # fmt: skip


class _Danger(NamedTuple):
    severity: _Level
    cause: str
    rank: int
    since_step: int
    figures: dict[str, Any]
    left_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class OomImminent(Rule):
    """Memory that cannot be given up is nearly full, or grows (growth.py) and will be full soon by its slope. A rise counts
    once it is as large as what is left at the brim.

    What the caching allocator reserves is no sign: healthy runs reach TraceML's 92 and 97 % of it. What is live at the peak
    of a step is, and so are allocations that had to empty the cache first (torchtitan warns of them).

    Its GPU part is not yet seen on a card: tested on made-up series.
    """

    full_pct: float = 92.0
    brim_pct: float = 97.0
    full_steps: int = 50
    soon_s: float = 1800.0
    at_once_s: float = 600.0
    used_pct: float = 75.0
    own_share: float = 0.3

    id = "oom_imminent"
    severities = ("info", "warning", "critical")
    question = Question.WILL_IT_GO_ON
    reads = (
        Every(3.0),
        *(Series(name, keep=_PEAK_OF_S, axis="time", ranks="apart") for name in _PER_GPU[:3]),
        *(Series(name, keep=2, axis="time", ranks="apart") for name in _PER_GPU[3:]),
        *OF_HOSTS,
        *OF_PROCESSES,
    )
    charts = ("cuda/reserved_bytes", "gpu/memory_used_bytes", "host/memory_used_bytes")
    life = Life(for_s=6.0, clear_s=60.0, restated=True)

    def judge(self, window: Window) -> Finding | Unknown | None:
        has_gpu = "gpu/memory_total_bytes" in window.by_time and "cuda/reserved_bytes" in window.by_time
        nodes = hosts(window)
        if not window.step or not (has_gpu or nodes):
            return None
        state = window.state_of(self, {"second": 0.0})
        newest = _newest_second(window)
        if newest <= state["second"]:
            return UNKNOWN
        state["second"] = newest
        dangers = [
            self._of_host(window, state, nodes) if nodes else None,
            self._of_gpu(window, state) if has_gpu else None,
        ]
        found = [danger for danger in dangers if danger is not None]
        if not found:
            return None
        worst = max(found, key=lambda one: (self.severities.index(one.severity), -(one.left_s or math.inf)))
        several = window.world_size > 1
        return self.found(
            worst.severity,
            cause=worst.cause,
            since_step=worst.since_step,
            ranks=[] if worst.figures["memory"] == "host" else [worst.rank],
            evidence={
                "rank": worst.rank, **worst.figures, "left_s": worst.left_s, "on_rank": worst.rank if several else None,
            },
        )  # fmt: skip

    def _limit(self, window: Window, pct: float) -> float:
        """While an alert is open, a little less is not enough."""
        return pct * (self.full_pct / self.brim_pct if window.is_firing(self.id) else 1.0)

    def _least(self, total: float) -> float:
        """Of a rise."""
        return (1 - self.brim_pct / 100) * total

    def _how_soon(self, left_s: float) -> _Level:
        return "critical" if left_s <= self.at_once_s else "warning"

    def _of_gpu(self, window: Window, state: dict[str, Any]) -> _Danger | None:
        retried = self._retries(window, state)
        allocated = window.readings("cuda/allocated_bytes").newest_by_rank()
        track = Track(state.setdefault("gpu", {}))
        if allocated:  # of tensors, on the device on which they hold most
            track.add(window.now, window.step, max(allocated.values()), parts=len(allocated))
        gpus = _gpus(window, self.used_pct)
        worst, full = max(gpus, key=lambda gpu: gpu.live_pct, default=None), self._limit(window, self.full_pct)
        if worst is None or worst.live_pct < full:
            state.pop("full_since", None)
        if worst is None:
            return None
        least = self._least(worst.total)
        rise = track.rise(least, settle_s=2 * _PEAK_OF_S, settle_steps=20) if allocated else None
        left_s = (worst.total - worst.live) / rise.per_s if rise is not None else math.inf
        if rise is not None and left_s <= self.soon_s:
            figures = {**worst.figures, **_of_rise(rise)}
            return _Danger(self._how_soon(left_s), "leak", worst.rank, rise.since_step, figures, left_s)
        tight = [gpu for gpu in gpus if gpu.rank in retried and gpu.taken_pct >= full]
        if tight:
            fullest = max(tight, key=lambda gpu: gpu.taken_pct)
            level: _Level = "critical" if fullest.taken_pct >= self.brim_pct else "warning"
            counted = {"alloc_retries": round(retried[fullest.rank]), "retries_over_s": self.at_once_s}
            return _Danger(level, "retries", fullest.rank, window.step, {**fullest.figures, **counted})
        if worst.live_pct < full:
            return None
        lasted = window.step - state.setdefault("full_since", window.step)
        if lasted < self.full_steps:
            return None
        level = "warning" if worst.live_pct >= self._limit(window, self.brim_pct) else "info"
        ours = (window.readings("cuda/reserved_bytes").newest(worst.rank) or 0.0) + _CONTEXT_BYTES
        by_others = max(0.0, worst.taken - ours)
        cause = "others on the GPU" if by_others > 0.1 * worst.total else ""
        figures = {**worst.figures, "full_steps": lasted, "others_bytes": by_others if cause else None}
        return _Danger(level, cause, worst.rank, window.step - lasted, figures)

    def _retries(self, window: Window, state: dict[str, Any]) -> dict[int, float]:
        """How many allocations of each rank had to empty the cache first within the last at_once_s."""
        seen: dict[str, float] = state.setdefault("retries", {})
        risen: list[list[float]] = state.setdefault("retried", [])
        for rank, count in window.readings("cuda/alloc_retries").newest_by_rank().items():
            more = count - seen.get(str(rank), count)
            if more > 0:
                risen.append([window.now, rank, more])
            seen[str(rank)] = count
        risen[:] = [one for one in risen if window.now - one[0] <= self.at_once_s]
        found: dict[int, float] = {}
        for _, of_rank, retries in risen:
            found[int(of_rank)] = found.get(int(of_rank), 0.0) + retries
        return found

    def _of_host(self, window: Window, state: dict[str, Any], nodes: list[Host]) -> _Danger | None:
        host = max(nodes, key=lambda node: node.used / node.total)
        track = Track(state.setdefault("host", {}))
        track.add(window.now, window.step, host.used, parts=len(nodes))
        used_pct = 100 * host.used / host.total
        if used_pct < self._limit(window, self.used_pct):
            return None
        held = [one.resident for one in (of_processes(window), of_workers(window)) if one is not None]
        own = sum(held) / len(nodes)
        is_ours = own >= self.own_share * host.used
        figures: dict[str, Any] = {
            "memory": "host", "total_bytes": host.total, "used_bytes": host.used, "used_pct": used_pct, "own_bytes": own,
        }  # fmt: skip
        for within_s in (self.at_once_s, self.soon_s):
            rise = track.rise(self._least(host.total), settle_s=_LASTED * within_s)
            left_s = (host.total - host.used) / rise.per_s if rise is not None else math.inf
            if rise is not None and left_s <= within_s:
                if left_s > self.at_once_s and window.is_firing("host_memory_leak"):
                    return None  # that rule says how long the memory lasts, where it can
                cause = "host memory" if is_ours else "others on the host"
                return _Danger(
                    self._how_soon(left_s), cause, host.rank, rise.since_step, {**figures, **_of_rise(rise)}, left_s
                )
        if used_pct >= self._limit(window, self.brim_pct) and is_ours:
            before = track.at(window.now - 60)
            rises = before is not None and host.used - before > 0.002 * host.total
            figures["trend"] = "rises" if rises else None
            return _Danger("critical" if rises else "warning", "host memory", host.rank, window.step, figures)
        return None


def _gpus(window: Window, least_pct: float) -> list[_Gpu]:
    """Those of which so much is taken."""
    reserved, allocated, headroom, _, used, total = (window.readings(name) for name in _PER_GPU)
    found = []
    for rank in reserved.ranks:
        size, held = total.newest(rank), reserved.newest(rank)
        if not size or held is None:
            continue
        taken = min(size, max(held, used.newest(rank) or 0.0))
        if 100 * taken < least_pct * size:
            continue
        tail = allocated.tail(_PEAK_OF_S, rank)
        # Without a word on what is live, all that is reserved may be.
        live = taken - max(0.0, held - max(size for _, size in tail)) if tail else taken
        told = headroom.tail(_PEAK_OF_S, rank)
        if told:
            live = max(live, size - min(free for _, free in told))
        found.append(_Gpu(rank, size, taken, min(size, live)))
    return found


def _newest_second(window: Window) -> float:
    names = ("process/rss_bytes", "host/memory_used_bytes", "cuda/reserved_bytes")
    known = [window.readings(name) for name in names]
    return max((found.tail(1, rank)[0][0] for found in known for rank in found.ranks), default=0.0)


def _of_rise(rise: Growth) -> dict[str, Any]:
    return {
        "grown_bytes": rise.grown, "over_s": rise.lasted_s, "grown_steps": rise.steps, "bytes_per_s": rise.per_s,
    }  # fmt: skip
