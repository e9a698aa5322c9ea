"""rank_memory_imbalance: few ranks need far more GPU memory than the others, and so bound the batch of all."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import ClassVar

from perfagent.wire import Finding
from perfagent_server.rules.evidence import spell_bytes
from perfagent_server.rules.rule import Every, Life, Place, Question, Rule, Series, Words, within
from perfagent_server.rules.window import Window

__all__ = ["RankMemoryImbalance"]

_PEAK, _TOTAL = "cuda/peak_allocated_bytes", "gpu/memory_total_bytes"


@dataclass(frozen=True, kw_only=True)
class RankMemoryImbalance(Rule):
    """The peak of a rank is more_pct (of itself) above that of a typical rank, and pressure_pct of its device
    (TraceML's skew and pressure).

    Stages of a pipeline, and shares of a model that cannot be cut evenly, differ in their memory on purpose. So only
    most_share of the ranks (at least one) may stand out, and the others must be alike to alike_pct. Of two ranks nobody
    knows whether they are two stages: that is never more than a remark.

    Not yet seen on a card: tested on made-up series.
    """

    info_more_pct: float = within(20.0, most=10_000)
    info_pressure_pct: float = 30.0
    warning_more_pct: float = within(30.0, most=10_000)
    warning_pressure_pct: float = 50.0
    most_share: float = 1 / 8
    alike_pct: float = 10.0
    warning_ranks: int = 3
    skip_steps: int = 20
    clear_at: float = 0.8

    id: ClassVar[str] = "rank_memory_imbalance"
    severities = ("info", "warning")
    place = Place(Question.WILL_IT_GO_ON, 7)
    reads = (Every(15.0), *(Series(name, keep=2, axis="time", ranks="apart") for name in (_PEAK, _TOTAL)))
    needs_card = True
    charts = (_PEAK, "gpu/memory_used_bytes")
    life = Life(for_s=60.0, clear_s=60.0, restated=True)
    english = Words(
        name="Memory differs between ranks",
        meaning="Few ranks need far more GPU memory than the others, and so bound the batch size of all.",
        fires=(
            "When one rank allocates far more GPU memory at its peak than the median rank. Info: the median rank needs "
            "{info_more_pct:g} % less, and the peak is {info_pressure_pct:g} % of the device. Warning, from {warning_ranks} "
            "ranks on: it needs {warning_more_pct:g} % less, and the peak is {warning_pressure_pct:g} % of the device. One "
            "rank may stand out so, and up to {most_share:.1%} of all. If more do, or if the others differ by more than "
            "{alike_pct:g} %, the ranks have different work (such as the stages of a pipeline), and the rule is silent."
        ),
        remedies={
            "": (
                "Find what only this rank keeps on its device: outputs gathered for metrics or logging (gather them on "
                "the CPU), an EMA or a teacher on one rank, a checkpoint loaded by all ranks onto one device "
                "(torch.load with map_location='cpu'), or longer batches (bucket by length). In a pipeline, move a layer "
                "from this stage to another."
            ),
            "rank 0": (
                "Rank 0 does what the others do not: load checkpoints with map_location='cpu' (or of the own device), "
                "call torch.cuda.set_device(local_rank) before the first use of CUDA, gather metrics and outputs on the "
                "CPU, and do not keep the whole state dict on the GPU when it saves."
            ),
        },
    )
    chinese = Words(
        name="各 rank 显存不均",
        meaning="少数 rank 需要的 GPU 显存远多于其他 rank，从而限制了所有 rank 的批次大小。",
        fires=(
            "某个 rank 的显存峰值远高于中位 rank 时触发。提示：中位 rank 少 {info_more_pct:g} %，且峰值占设备的 "
            "{info_pressure_pct:g} %。警告（至少 {warning_ranks} 个 rank）：中位 rank 少 {warning_more_pct:g} %，且峰值占设备的 "
            "{warning_pressure_pct:g} %。若超过 {most_share:.1%} 的 rank（至少允许一个）偏高，或其余 rank 相差超过 "
            "{alike_pct:g} %，则各 rank 的工作不同（例如流水线的不同阶段），不算此问题。"
        ),
        remedies={
            "": (
                "找出只有该 rank 在其设备上保留的内容：为指标或日志汇集的输出（改在 CPU 上汇集）、单个 rank 上的 EMA "
                "或教师模型、所有 rank 都加载到同一设备的检查点（torch.load 使用 map_location='cpu'），"
                "或更长的批次（按长度分桶）。在流水线中，把一层移到其他阶段。"
            ),
            "rank 0": (
                "rank 0 做了其他 rank 不做的事：用 map_location='cpu'（或自己的设备）加载检查点，在首次使用 CUDA 之前调用 "
                "torch.cuda.set_device(local_rank)，在 CPU 上汇集指标和输出，保存时不要把完整的 state dict 留在 GPU 上。"
            ),
        },
    )

    def judge(self, window: Window) -> Finding | None:
        peaks, totals = window.by_time.get(_PEAK), window.by_time.get(_TOTAL)
        if window.world_size < 2 or peaks is None or totals is None:
            return None
        if window.step - window.start_step <= self.skip_steps:
            return None
        of_rank = {rank: peak for rank in peaks.ranks if (peak := peaks.newest(rank))}
        if len(of_rank) < max(2, window.world_size // 2):
            return None
        ordered = sorted(of_rank.values())
        typical = ordered[0] if len(ordered) == 2 else median(ordered)
        limit = self.clear_at if window.is_firing(self.id) else 1.0
        high = [rank for rank, peak in of_rank.items() if 100 * (peak - typical) >= limit * self.info_more_pct * peak]
        if not high or len(high) > max(1, int(self.most_share * len(of_rank))):
            return None
        others = [peak for rank, peak in of_rank.items() if rank not in high]
        if 100 * (max(others) - min(others)) > self.alike_pct * typical:
            return None
        worst = max(high, key=lambda rank: of_rank[rank])
        total = totals.newest(worst)
        if not total:
            return None
        more, pressure = 100 * (of_rank[worst] - typical) / of_rank[worst], 100 * of_rank[worst] / total
        if pressure < self.info_pressure_pct:
            return None
        is_warning = (
            len(of_rank) >= self.warning_ranks
            and more >= limit * self.warning_more_pct
            and pressure >= self.warning_pressure_pct
        )
        who = f"Rank {worst} needs" if len(high) == 1 else f"{len(high)} of {len(of_rank)} ranks need"
        more_bytes = of_rank[worst] - typical
        return self.found(
            "warning" if is_warning else "info",
            f"{who} {spell_bytes(more_bytes)} more GPU memory than the others",
            f"At its peak, rank {worst} holds {spell_bytes(of_rank[worst])} of the {spell_bytes(total)} of its GPU "
            f"({pressure:.0f} %); a typical rank holds {spell_bytes(typical)}. The {spell_bytes(more_bytes)} more "
            f"({more:.0f} %) bound the batch size of all {len(of_rank)} ranks.",
            cause="rank 0" if worst == 0 else "",
            cost=f"{spell_bytes(more_bytes)} on each of the other ranks lie idle",
            since_step=window.step,
            ranks=sorted(high),
            evidence={
                "rank": worst, "peak_bytes": of_rank[worst], "typical_peak_bytes": typical, "more_pct": more,
                "pressure_pct": pressure, "total_bytes": total,
                "peak_bytes_by_rank": {str(rank): peak for rank, peak in sorted(of_rank.items())[:64]},
            },
        )  # fmt: skip
