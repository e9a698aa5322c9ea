"""unchanged_tensor: some trainable parameters do not move while others do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from perfagent.wire import Finding
from perfagent.wire.limits import whole
from perfagent_server.rules.evidence import spell_pct
from perfagent_server.rules.model.parameter_events import PARAMETERS, named, names_in, newest
from perfagent_server.rules.rule import UNKNOWN, Life, Place, Question, Rule, Series, Unknown, Words, within
from perfagent_server.rules.window import Noted, Window

__all__ = ["UnchangedTensor"]

_SHARE = "update/unmoved_share"
_MOSTLY = 0.5


@dataclass(frozen=True, kw_only=True)
class UnchangedTensor(Rule):
    """Parameters that are trainable and that the optimizer has did not change between `observations` comparisons in a
    row, each over 20 steps or more.

    SageMaker Debugger's UnchangedTensor compares three times within a tolerance; here every number of a sample must be
    the same, bit by bit. If nothing at all moves, that is another trouble (a learning rate of zero at the end of a
    schedule, `frozen_training`). Experts that got no token stand still in a healthy mixture: a remark.
    """

    share_pct: float = 1.0
    warning_pct: float = 10.0
    observations: int = within(2, least=1, most=4)
    clear_at: float = 0.8  # of the threshold

    id: ClassVar[str] = "unchanged_tensor"
    severities = ("info", "warning")
    place = Place(Question.DOES_IT_LEARN, 10)
    reads = (PARAMETERS, Series(_SHARE, keep=4, judged=True))
    charts = (_SHARE, "update/ratio")
    life = Life(restated=True)
    english = Words(
        name="Parameters that stand still",
        meaning="Some trainable parameters do not change, while others do.",
        fires=(
            "When at least {share_pct:g} % of the trainable numbers (warning: {warning_pct:g} %), but not all, did not "
            "change at all in {observations} comparisons in a row. A sample of each parameter is compared over 20 "
            "steps or more. Frozen parameters do not count. It stays a remark where only experts of a mixture stand "
            "still."
        ),
        remedies={
            "": (
                "The updates are too small for the number format: weights in bf16 lose what is below 1/256 of them. "
                "Keep fp32 weights and compute under autocast, or use an optimizer with fp32 copies or stochastic "
                "rounding; in fp32, raise the learning rate of these parameters."
            ),
            "no gradient": (
                "No gradient reaches them: look for detach(), .data, .item(), numpy or torch.no_grad() between them "
                "and the loss, for a layer that forward never calls, and for an argmax or round. If they are meant to "
                "stay, freeze them (requires_grad_(False))."
            ),
            "learning rate": (
                "Their parameter group has a learning rate of 0: look at the groups of the optimizer and at the "
                "schedule, which has one factor for each group."
            ),
        },
    )
    chinese = Words(
        name="停滞不动的参数",
        meaning="部分可训练参数没有改变，而其他参数在改变。",
        fires=(
            "至少 {share_pct:g} %（警告：{warning_pct:g} %）但不是全部的可训练数值，在连续 {observations} "
            "次比较中完全没有改变时触发；每次比较跨越 20 步或更多，取每个参数的一个样本。冻结的参数不计。"
            "若只有混合专家中的专家停滞，则仅作提示。"
        ),
        remedies={
            "": (
                "更新量小于数值格式的精度：bf16 权重会丢失小于其 1/256 的部分。保留 fp32 权重并在 autocast 下计算，"
                "或使用带 fp32 副本或随机舍入的优化器；若为 fp32，请提高这些参数的学习率。"
            ),
            "no gradient": (
                "没有梯度到达它们：检查它们与损失之间是否有 detach()、.data、.item()、numpy 或 torch.no_grad()，"
                "是否有 forward 从未调用的层，或 argmax、round。若本意是不变，请冻结（requires_grad_(False)）。"
            ),
            "learning rate": "它们的参数组学习率为 0：检查优化器的参数组，以及对每个组有一个系数的学习率调度。",
        },
    )

    def judge(self, window: Window) -> Finding | Unknown | None:
        series = window.series(_SHARE)
        if series is None:
            return None
        shares = series.last(self.observations)
        if len(shares) < self.observations:
            return UNKNOWN
        lowest = self.share_pct * (self.clear_at if window.is_firing(self.id) else 1.0)
        share = 100 * min(shares)
        if share < lowest or max(shares) >= 1.0:
            return None
        return self._finding(window, share, series.last_steps(self.observations)[0], newest(window, "unmoved"))

    def _finding(self, window: Window, share: float, first: int, told: Noted | None) -> Finding:
        names = names_in(told) if told is not None else []
        steps = (whole(told.data.get("steps")) if told is not None else None) or 0
        who = f": {named(told)}" if told is not None and names else ""
        only_experts = bool(names) and all("expert" in name.lower() for name in names)
        cause = _cause_of(told)
        why = {
            "no gradient": "No gradient reaches them.",
            "learning rate": "Their learning rate is 0.",
        }.get(cause, "They get gradients, and their updates are rounded away or zero.")
        return self.found(
            "warning" if share >= self.warning_pct and not only_experts else "info",
            f"{spell_pct(share, 2)} of the trainable numbers do not move",
            f"{spell_pct(share, 2)} of the trainable numbers did not change in {self.observations} comparisons up to step "
            f"{window.at:,}{who}. {why if told is not None else ''}".rstrip(),
            cause=cause,
            cost=f"{spell_pct(share, 2)} of the model does not learn",
            since_step=max(window.start_step, first - steps),
            evidence={
                "share_pct": share, "parameters": names, "count": told.data.get("count") if told is not None else None,
                "without_gradient": told.data.get("without_gradient") if told is not None else None,
                "without_rate": told.data.get("without_rate") if told is not None else None, "steps": steps,
            },
        )  # fmt: skip


def _cause_of(told: Noted | None) -> str:
    if told is None:
        return ""
    numbers = whole(told.data.get("numbers")) or 0
    for cause, key in (("no gradient", "without_gradient"), ("learning rate", "without_rate")):
        if (whole(told.data.get(key)) or 0) > _MOSTLY * numbers:
            return cause
    return ""
