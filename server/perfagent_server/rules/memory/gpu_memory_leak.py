"""gpu_memory_leak: live tensors on the GPUs grow without end."""

from __future__ import annotations

from dataclasses import dataclass

from perfagent.wire import Finding
from perfagent_server.rules.evidence import where
from perfagent_server.rules.memory.growth import Track
from perfagent_server.rules.rule import UNKNOWN, Every, Life, Question, Rule, Series, Unknown
from perfagent_server.rules.window import Window

__all__ = ["GpuMemoryLeak"]

_ALLOCATED = "cuda/allocated_bytes"
_HEADROOM = "cuda/headroom_bytes"
_LOWEST_OF_S = 20  # readings, one a second: what lives only within a step is in no lowest one


@dataclass(frozen=True, kw_only=True)
class GpuMemoryLeak(Rule):
    """What tensors hold between steps grows (growth.py).

    Stricter than TraceML's bands (1 GiB over 800 steps): batches of other lengths move the peak of a step, not what stays
    after it. In the first seconds and steps the optimizer's state, compiled graphs and communication buffers come up.
    """

    leaked_mib: float = 190.0
    leaked_pct: float = 2.0
    settle_s: float = 30.0
    settle_steps: int = 150
    skip_s: float = 15.0
    skip_steps: int = 20

    id = "gpu_memory_leak"
    severities = ("warning",)
    question = Question.WILL_IT_GO_ON
    after = ("disk_full",)
    reads = (
        Every(5.0),
        Series(_ALLOCATED, keep=_LOWEST_OF_S, axis="time", ranks="apart"),
        Series(_HEADROOM, keep=_LOWEST_OF_S, axis="time", ranks="apart"),
    )
    needs_card = True
    charts = (_ALLOCATED, "cuda/reserved_bytes")
    life = Life(for_s=5.0, clear_s=60.0, restated=True)

    def judge(self, window: Window) -> Finding | Unknown | None:
        allocated = window.readings(_ALLOCATED)
        if not allocated.ranks or not window.step:
            return None
        state = window.state_of(self, {"began": window.now, "from_step": window.step, "second": 0.0})
        if window.now - state["began"] < self.skip_s or window.step - state["from_step"] < self.skip_steps:
            return None
        tails = {rank: allocated.tail(_LOWEST_OF_S, rank) for rank in allocated.ranks}
        lowest = {rank: min(size for _, size in tail) for rank, tail in tails.items()}
        newest = max(tail[-1][0] for tail in tails.values())
        if newest <= state["second"]:
            return UNKNOWN
        state["second"] = newest
        first = state.setdefault("first", {str(rank): size for rank, size in lowest.items()})
        track = Track(state.setdefault("track", {}))
        track.add(window.now, window.step, sum(lowest.values()), parts=len(lowest))
        least = max(self.leaked_mib * 2**20, self.leaked_pct / 100 * track.first())
        rise = track.rise(least, settle_s=self.settle_s, settle_steps=self.settle_steps)
        if rise is None:
            return None
        grown = {rank: size - first.get(str(rank), size) for rank, size in lowest.items()}
        most = max(grown.values())
        ranks = sorted(rank for rank, size in grown.items() if 2 * size >= most)
        return self.found(
            "warning",
            since_step=rise.since_step,
            ranks=ranks,
            evidence={
                "allocated_bytes": rise.now, "first_bytes": rise.first, "grown_bytes": rise.grown,
                "bytes_per_step": rise.grown / max(1, rise.steps), "bytes_per_hour": 3600 * rise.per_s, "over_s": rise.lasted_s,
                "steps": rise.steps, "left_s": _left_s(window, ranks, rise.per_s / len(ranks)),
                **where(window, ranks),
            },
        )  # fmt: skip


def _left_s(window: Window, ranks: list[int], per_s: float) -> float | None:
    """How long what is free lasts on the tightest of these ranks; None where the agent cannot know what is free."""
    headroom = window.readings(_HEADROOM)
    free = [min(size for _, size in tail) for rank in ranks if (tail := headroom.tail(_LOWEST_OF_S, rank))]
    return min(free) / per_s if free else None
