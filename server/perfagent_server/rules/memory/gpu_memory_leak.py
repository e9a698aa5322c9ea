"""gpu_memory_leak: live tensors on the GPUs grow without end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from perfagent.wire import Finding
from perfagent_server.rules.evidence import named_ranks, spell_bytes
from perfagent_server.rules.memory.growth import Growth, Track, spell_long_s
from perfagent_server.rules.rule import UNKNOWN, Every, Life, Place, Question, Rule, Series, Unknown, Words
from perfagent_server.rules.window import Window

__all__ = ["GpuMemoryLeak"]

_ALLOCATED = "cuda/allocated_bytes"
_HEADROOM = "cuda/headroom_bytes"
_LOWEST_OF_S = 20  # readings, one a second: what lives only within a step is in no lowest one


@dataclass(frozen=True, kw_only=True)
class GpuMemoryLeak(Rule):
    """What tensors hold on the GPUs between steps (the lowest of 20 readings, one a second, all ranks together) rises steadily
    (growth.py): leaked_mib and leaked_pct of what was held were added, and the rise went on for settle_s and
    settle_steps after that.

    Stricter than TraceML's bands (1 GiB over 800 steps): batches of other lengths move the peak of a step, and not what
    stays after it. The first skip_s seconds and skip_steps steps do not count: the optimizer's state, compiled graphs
    and communication buffers come up then.
    """

    leaked_mib: float = 190.0
    leaked_pct: float = 2.0
    settle_s: float = 30.0
    settle_steps: int = 150
    skip_s: float = 15.0
    skip_steps: int = 20

    id: ClassVar[str] = "gpu_memory_leak"
    severities = ("warning",)
    place = Place(Question.WILL_IT_GO_ON, 3)
    reads = (
        Every(5.0),
        Series(_ALLOCATED, keep=_LOWEST_OF_S, axis="time", ranks="apart"),
        Series(_HEADROOM, keep=_LOWEST_OF_S, axis="time", ranks="apart"),
    )
    needs_card = True
    seen_on = "an NVIDIA H200"
    charts = (_ALLOCATED, "cuda/reserved_bytes")
    life = Life(for_s=5.0, clear_s=60.0, restated=True)
    english = Words(
        name="GPU memory leak",
        meaning="What tensors hold on the GPUs after each step grows without end.",
        fires=(
            "When the memory of live tensors between steps (the lowest of 20 readings, one a second, all ranks together) rises "
            "steadily, without slowing down or falling back: at least {leaked_mib:g} MiB and {leaked_pct:g} % were added, "
            "and the rise went on for {settle_s:g} s and {settle_steps} steps after that. What a step needs for its activations "
            "does not count, and the first {skip_s:g} s and {skip_steps} steps do not."
        ),
        remedies={
            "": (
                "Tensors of old steps are kept: append loss.item() or loss.detach() to lists, never the loss itself, "
                "whose graph holds all activations; empty the lists of outputs in callbacks and metrics; do not call "
                "backward(retain_graph=True) in the loop; detach the hidden state of a recurrent model. "
                "torch.cuda.memory._record_memory_history() and _dump_snapshot() show which line allocated what stays."
            ),
        },
    )
    chinese = Words(
        name="GPU 显存泄漏",
        meaning="每步之后张量在 GPU 上占用的显存不断增长。",
        fires=(
            "步与步之间存活张量的显存（每 20 个读数（每秒一个）中的最低值，所有 rank 合计）持续上升，既不减缓也不回落："
            "已增加至少 {leaked_mib:g} MiB 且 {leaked_pct:g} %，并且此后又持续增长了 {settle_s:g} 秒和 {settle_steps} 步时触发。"
            "一步之内激活所需的显存不计，前 {skip_s:g} 秒和前 {skip_steps} 步也不计。"
        ),
        remedies={
            "": (
                "旧步的张量被保留：列表中只追加 loss.item() 或 loss.detach()，不要追加带有全部激活的 loss；"
                "清空回调和指标中的输出列表；循环中不要使用 backward(retain_graph=True)；循环网络的隐状态要 detach。"
                "torch.cuda.memory._record_memory_history() 与 _dump_snapshot() 可显示是哪一行分配的。"
            ),
        },
    )

    def judge(self, window: Window) -> Finding | Unknown | None:
        allocated = window.by_time.get(_ALLOCATED)
        if allocated is None or not window.step:
            return None
        state = window.state_of(self, {"began": window.now, "from_step": window.step, "second": 0.0})
        if window.now - state["began"] < self.skip_s or window.step - state["from_step"] < self.skip_steps:
            return None
        lowest: dict[int, float] = {}
        newest = 0.0
        for rank in allocated.ranks:
            tail = allocated.tail(_LOWEST_OF_S, rank)
            lowest[rank] = min(size for _, size in tail)
            newest = max(newest, tail[-1][0])
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
        return self._finding(window, rise, sorted(rank for rank, size in grown.items() if 2 * size >= most))

    def _finding(self, window: Window, rise: Growth, ranks: list[int]) -> Finding:
        per_step = rise.grown / max(1, rise.steps)
        left_s = _left_s(window, ranks, rise.per_s / len(ranks))
        where = "" if window.world_size == 1 else f" on {named_ranks(ranks, window.world_size)}"
        lasts = (
            f" The memory of the device is full in {spell_long_s(left_s)} if it goes on." if left_s is not None else ""
        )
        return self.found(
            "warning",
            f"What tensors hold on the GPU grows by {spell_bytes(per_step)} a step",
            f"What tensors hold{where} between steps grew from {spell_bytes(rise.first)} to {spell_bytes(rise.now)} in "
            f"{spell_long_s(rise.lasted_s)} ({rise.steps:,} steps), steadily and without falling back: "
            f"{spell_bytes(per_step)} a step, {spell_bytes(3600 * rise.per_s)} an hour.{lasts}",
            cost=f"{spell_bytes(3600 * rise.per_s)} of GPU memory an hour, until it runs out",
            since_step=rise.since_step,
            ranks=ranks,
            evidence={
                "allocated_bytes": rise.now, "first_bytes": rise.first, "grown_bytes": rise.grown,
                "bytes_per_step": per_step, "bytes_per_hour": 3600 * rise.per_s, "over_s": rise.lasted_s,
                "steps": rise.steps, "left_s": left_s,
            },
        )  # fmt: skip


def _left_s(window: Window, ranks: list[int], per_s: float) -> float | None:
    """How long what is free lasts on the tightest of these ranks; None where the agent cannot know what is free."""
    headroom = window.by_time.get(_HEADROOM)
    if headroom is None:
        return None
    free = [min(size for _, size in tail) for rank in ranks if (tail := headroom.tail(_LOWEST_OF_S, rank))]
    return min(free) / per_s if free else None
