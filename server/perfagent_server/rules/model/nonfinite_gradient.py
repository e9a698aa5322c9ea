"""nonfinite_gradient: a gradient is NaN or infinite, and the step was taken."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from perfagent.wire import LOSS, Finding
from perfagent_server.rules.evidence import named_ranks, surroundings
from perfagent_server.rules.model import grad_scaler
from perfagent_server.rules.model.grad_scaler import was_skipped
from perfagent_server.rules.rule import Life, Place, Question, Rule, Series, Words
from perfagent_server.rules.window import Window

__all__ = ["NonfiniteGradient"]


@dataclass(frozen=True, kw_only=True)
class NonfiniteGradient(Rule):
    """A gradient of a step is NaN or infinite on any rank, and the step was taken.

    With a GradScaler, overflow is how it looks for its scale: a step that it skipped is no fault, while the scale is
    above lowest_scale and not more than excused_steps in a row are skipped (its search from 65536 takes 16 halvings at
    most). The counter of skipped steps may follow one step later, so that such a run is judged wait_steps behind its
    newest step.
    """

    excused_steps: int = 20
    lowest_scale: float = 1.0
    wait_steps: int = 1

    id: ClassVar[str] = "nonfinite_gradient"
    severities = ("critical",)
    place = Place(Question.ARE_ITS_NUMBERS_FINITE, 2)
    reads = (
        Series("grad/norm", merge="max", judged=True),
        Series("grad/nonfinite", merge="sum", judged=True),
        Series("grad/local_square_sum", merge="root of sum", part_of="grad/norm"),
        Series(LOSS),
        Series("lr", merge="max"),
        *grad_scaler.READS,
    )
    urgent = "gradient"
    charts = ("grad/norm", "grad/nonfinite")
    life = Life(clear_steps=50, outlives_run=True)
    joins = ("nonfinite_loss",)
    same_step = True
    english = Words(
        name="Gradient is NaN or infinite",
        meaning="A gradient of a step is NaN or infinite, and the optimizer took the step.",
        fires=(
            "At once, when a gradient of a step is NaN or infinite on any rank, and the optimizer took the step. "
            "Steps that a GradScaler skips while it searches for its scale are excused: at most {excused_steps} in a "
            "row, while the scale is at least {lowest_scale:g}."
        ),
        remedies={
            "": (
                "Do not step on these gradients: clip_grad_norm_(..., error_if_nonfinite=True) or GradScaler skips "
                "such a step. If it repeats, lower the learning rate, use bf16 instead of fp16, and look at the "
                "layer and the batch named in the evidence."
            ),
        },
    )
    chinese = Words(
        name="梯度为 NaN 或无穷大",
        meaning="某一步的梯度不是有限数值，而优化器仍执行了这一步。",
        fires=(
            "任一 rank 上某一步的梯度为 NaN 或无穷大且优化器执行了该步时立即触发。GradScaler "
            "搜索缩放因子时跳过的步不计：连续最多 {excused_steps} 步，且缩放因子不低于 {lowest_scale:g}。"
        ),
        remedies={
            "": (
                "不要用这样的梯度更新：clip_grad_norm_(..., error_if_nonfinite=True) 或 GradScaler 会跳过该步。"
                "若反复出现，请降低学习率、用 bf16 代替 fp16，并查看证据中指出的层和批次。"
            ),
        },
    )

    def judge(self, window: Window) -> Finding | None:
        bad = window.nonfinite_at("gradient", window.at)
        if bad is None:
            return None
        scale = window.by_step.get("amp/scale")
        if scale is not None and scale.values and was_skipped(window, window.at, later=self.wait_steps):
            row = 0
            while row <= self.excused_steps and window.nonfinite_at("gradient", window.at - row) is not None:
                row += 1
            if row <= self.excused_steps and scale.values[-1] >= self.lowest_scale:
                return None
        where = f" on {named_ranks(bad.ranks, window.world_size)}" if window.world_size > 1 else ""
        counts = window.by_step.get("grad/nonfinite")
        count = (
            next((value for step, value in zip(counts.steps, counts.values, strict=True) if step == window.at), None)
            if counts
            else None
        )
        tensors = f" ({count:.0f} parameter tensor{'' if count == 1 else 's'})" if count else ""
        losses = window.by_step["loss"].before(window.at, 20) if "loss" in window.by_step else []
        return self.found(
            "critical",
            f"The gradient became NaN or infinite in step {window.at:,}",
            f"The gradient became NaN or infinite in step {window.at}{where}{tensors}.",
            since_step=window.at,
            ranks=list(bad.ranks),
            evidence={"step": window.at, "tensors": count, **surroundings(window), "last_losses": losses},
        )
