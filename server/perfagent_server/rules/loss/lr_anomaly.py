"""lr_anomaly: the learning rate is invalid, stays at zero, or jumped."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median
from typing import Any, ClassVar

from perfagent.wire import LOSS, Finding
from perfagent_server.rules.loss import zero_rate
from perfagent_server.rules.loss.loss_series import named
from perfagent_server.rules.rule import UNKNOWN, Life, Place, Question, Rule, Series, Unknown, Words, within
from perfagent_server.rules.window import Window

__all__ = ["LrAnomaly"]

_BEFORE = 48  # values of the loss before a jump of the rate
_AFTER = 9


@dataclass(frozen=True, kw_only=True)
class LrAnomaly(Rule):
    """The learning rate is no number, or negative (critical at once); it is zero, or a millionth of its peak, for
    zero_steps after it was more (for 5 % of the run if it decayed to it: schedules end so), and no weight is known to
    have moved since; it jumps to more than jump_times its
    highest value so far; or it is high_rate or more when the loss is no number after it grew by grown_times (a remark).

    Schedules jump with reason: down at milestones, up to a rate they had before at warm restarts, and in the large
    steps of a warm-up by epochs. So a jump counts only when it goes to a new peak, and is a warning only when the loss
    got worse by it: the median of nine of the worse_steps values after it stands loss_pct and loss_spreads of their
    spread above the 48 before. Else it is a remark if the rate had been lowered before, and nothing in a warm-up.
    """

    zero_steps: int = 50
    zero_share: float = 1e-6
    jump_times: float = 2.0
    skip_steps: int = 20
    worse_steps: int = 200
    loss_pct: float = within(5.0, most=10_000)
    loss_spreads: float = 2.0
    high_rate: float = 1e-3
    grown_times: float = 2.0

    id: ClassVar[str] = "lr_anomaly"
    severities = ("info", "warning", "critical")
    place = Place(Question.DOES_IT_LEARN, 13)
    reads = (
        Series("lr", merge="max", judged=True), Series(LOSS, keep=64, judged=True), Series("update/ratio", keep=16),
    )  # fmt: skip
    charts = ("lr", LOSS)
    life = Life(clear_steps=20, restated=True)
    joins = ("frozen_training", "loss_divergence", "nonfinite_loss")
    english = Words(
        name="Odd learning rate",
        meaning="The learning rate is invalid, stays at zero, or jumped.",
        fires=(
            "At once (critical) when it is NaN, infinite or negative. When it stays at zero, or at {zero_share:g} of its "
            "peak, for {zero_steps} steps after it was higher (at the end of a decay: for 5 % of the run), and no weight "
            "is known to have moved. When it jumps to more than {jump_times:g} times its highest value so far and the loss "
            "gets worse by it, by {loss_pct:g} % and {loss_spreads:g} times its spread within {worse_steps} steps (without that: "
            "a remark, if it had been lowered before). A rate of {high_rate:g} or more at which the loss grew until it was "
            "NaN is a remark. Warm-ups, warm restarts and milestones are silent."
        ),
        remedies={
            "": (
                "Look at the code that sets it: a scheduler beyond its last step, a division by zero in a lambda, two "
                "schedulers on one optimizer, or a rate that was restored from a checkpoint of another run."
            ),
            "zero": (
                "The schedule has run out before the run did: make it for as many optimizer steps as the run makes (after "
                "gradient accumulation), step it once per optimizer step, or stop the run."
            ),
            "jump": (
                "Go back to the last checkpoint from before the jump. If it was meant, raise the rate over some hundred "
                "steps; if it was not, look for a scheduler that was made anew (last_epoch=-1) or restored wrongly."
            ),
            "NaN": (
                "The loss is no number at a high learning rate: start again from the last good checkpoint with a third "
                "of it, or a longer warm-up, before you look for anything else."
            ),
        },
    )
    chinese = Words(
        name="学习率异常",
        meaning="学习率处于任何调度都不会有的状态。",
        fires=(
            "为 NaN、无穷大或负数时立即触发（严重）。为零或仅为峰值的 {zero_share:g} 达 {zero_steps} 步"
            "（若是逐渐衰减到零，则为运行的 5 %），且没有测量表明权重变化时触发。"
            "跳到迄今最高值的 {jump_times:g} 倍以上，且 {worse_steps} 步内损失因此升高 {loss_pct:g} % 和离散度的 "
            "{loss_spreads:g} 倍时触发（若损失未变差而学习率此前曾下降，则仅作提示）。"
            "损失增长到 NaN 且学习率不低于 {high_rate:g} 时作提示。预热、热重启和阶梯下降不告警。"
        ),
        remedies={
            "": (
                "检查设置学习率的代码：调度器超出最后一步、lambda 中除以零、同一优化器上有两个调度器，"
                "或从其他运行的检查点恢复了学习率。"
            ),
            "zero": (
                "调度先于训练结束：按实际的优化器步数（梯度累积之后）创建调度，每个优化器步推进一次，或停止运行。"
            ),
            "jump": (
                "回到跳变之前的检查点。若是有意为之，请用数百步逐渐升高；否则检查是否重新创建了调度器（last_epoch=-1）"
                "或恢复有误。"
            ),
            "NaN": "损失在较高学习率下变为非数值：先从最后一个正常检查点以三分之一的学习率或更长的预热重新开始。",
        },
    )

    def judge(self, window: Window) -> Finding | Unknown | None:
        rates = window.series("lr")
        if rates is None or rates.value is None or rates.step is None:
            return UNKNOWN
        # zero: see zero_rate; last, peak: the newest rate, the highest; fell: whether it was ever lowered; jump: the last
        # one to a new peak: [step, from, to, whether the loss got worse, whether the rate had been lowered before, the
        # loss above which it is worse]
        fresh = {"step": -1, "peak": 0.0, "last": 0.0, "fell": False, "jump": None, "zero": dict(zero_rate.FRESH)}
        state = window.state_of(self, fresh)
        rate = rates.value
        if not math.isfinite(rate) or rate < 0:
            return self._impossible(window, rate, rates.step, state["last"])
        if rates.step != state["step"]:
            self._follow(window, state, rate, rates.step)
        if state["peak"] > 0 and zero_rate.stays_zero(window, state["zero"], self.zero_steps):
            return self._zero(window, state, rate)
        if state["jump"] is not None:
            jumped = self._jumped(window, state)
            if jumped is not None:
                return jumped
        if rate >= self.high_rate and window.is_firing("nonfinite_loss") and self._grew(window):
            return self._found(
                window, "info", f"The loss grew until it was no number, at a learning rate of {rate:.3g}",
                f"The loss grew until it was no number, at a learning rate of {rate:.3g} (its peak: {state['peak']:.3g}).",
                "NaN", window.at,
            )  # fmt: skip
        return None

    def _grew(self, window: Window) -> bool:
        """Whether the newest finite losses grew, which a bad sample does not make them do."""
        track = None if window.loss_name is None else window.series(window.loss_name)
        known = [value for value in track.last(track.size) if math.isfinite(value)] if track else []
        return len(known) > 1 and known[-1] >= self.grown_times * max(min(known[-20:]), 0.0) and known[-1] > known[-2]

    def _follow(self, window: Window, state: dict[str, Any], rate: float, step: int) -> None:
        last, peak = state["last"], state["peak"]
        is_early = step <= window.start_step + self.skip_steps or state["step"] < 0
        if not is_early and peak > 0 and rate > self.jump_times * peak * (1 + 1e-6):
            state["jump"] = [step, last, rate, False, state["fell"], self._limit(window, step)]
        state["fell"] = state["fell"] or rate < last * (1 - 1e-6)
        state.update(step=step, last=rate, peak=max(peak, rate))
        zero_rate.follow(state["zero"], rate, step, zero_share=self.zero_share)

    def _jumped(self, window: Window, state: dict[str, Any]) -> Finding | None:
        step, before, after, is_worse, fell, limit = state["jump"]
        if not is_worse and window.at > step + self.worse_steps:
            state["jump"] = None
            return None
        if not is_worse and self._got_worse(window, step, limit):
            is_worse = state["jump"][3] = True
        if is_worse and window.at > step + 5 * self.worse_steps:
            state["jump"] = None
            return None
        if not is_worse and not fell:
            return None
        worse = f", and {named(window.loss_name or LOSS).lower()} got worse by it" if is_worse else ""
        return self._found(
            window, "warning" if is_worse else "info",
            f"The learning rate jumped from {before:.3g} to {after:.3g} at step {step:,}",
            f"The learning rate jumped from {before:.3g} to {after:.3g} at step {step:,}, more than {self.jump_times:g} times "
            f"its highest value before{worse}.",
            "jump", step,
        )  # fmt: skip

    def _limit(self, window: Window, step: int) -> float:
        """Above which the loss is worse than before this step; infinite if too little came before it."""
        track = None if window.loss_name is None else window.series(window.loss_name)
        before = sorted(value for value in track.before(step, _BEFORE) if math.isfinite(value)) if track else []
        if len(before) < _BEFORE // 2:
            return math.inf
        level, quarter = median(before), len(before) // 4
        spread = (before[-1 - quarter] - before[quarter]) / 1.349
        return level + max(self.loss_pct / 100 * abs(level), self.loss_spreads * spread)

    def _got_worse(self, window: Window, step: int, limit: float) -> bool:
        track = None if window.loss_name is None else window.series(window.loss_name)
        if track is None or track.seen < _AFTER or track.last_steps(_AFTER)[0] <= step:
            return False
        after = [value for value in track.last(_AFTER) if math.isfinite(value)]
        return 2 * len(after) > _AFTER and median(after) > limit

    def _impossible(self, window: Window, rate: float, step: int, before: float) -> Finding:
        spelled = "NaN" if math.isnan(rate) else "infinite" if math.isinf(rate) else f"{rate:.3g}"
        return self._found(
            window, "critical", f"The learning rate is {spelled} in step {step:,}",
            f"The learning rate is {spelled} in step {step:,}, after {before:.3g}: the step moves the weights to nowhere.",
            "", step,
        )  # fmt: skip

    def _zero(self, window: Window, state: dict[str, Any], rate: float) -> Finding:
        said = "zero" if rate == 0 else f"{rate:.2g}"
        return self._found(
            window, "warning", f"The learning rate has been {said} since step {state['zero']['since']:,}",
            f"The learning rate has been {said} since step {state['zero']['since']:,}, after a peak of {state['peak']:.3g}: "
            "the run goes on and learns nothing more.",
            "zero", state["zero"]["since"],
        )  # fmt: skip

    def _found(self, window: Window, severity: Any, title: str, message: str, cause: str, since: int) -> Finding:
        series = window.loss_name
        track = None if series is None else window.series(series)
        rates = window.series("lr")
        return self.found(
            severity, title, message, cause=cause, since_step=since,
            evidence={
                "step": window.at, "since_step": since, "series": series, "lr": window.value("lr"),
                "last_lrs": rates.last(50) if rates else [], "last_losses": track.last(50) if track else [],
            },
        )  # fmt: skip
