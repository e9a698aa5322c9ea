"""unmeasured_time: much of the step goes into code that no phase accounts for."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Any, ClassVar

from perfagent.wire import Finding
from perfagent_server.rules.evidence import spell_s
from perfagent_server.rules.rule import UNKNOWN, Events, Every, Life, Place, Question, Rule, Unknown, Words, within
from perfagent_server.rules.speed import step_shares
from perfagent_server.rules.speed.source_lines import told_lines
from perfagent_server.rules.speed.step_shares import UTILIZATION, busy_pct
from perfagent_server.rules.window import Window

__all__ = ["UnmeasuredTime"]


@dataclass(frozen=True, kw_only=True)
class UnmeasuredTime(Rule):
    """phase/other_s takes share_pct of the newest ten minutes, without its longest step; what it is, nobody measured. A
    fact and no fault: a simulation in the loop is as unmeasured as a plot that nobody needs.

    Where the GPUs are busy for busy_pct of the time, the host only waits for their work.
    """

    share_pct: float = 30.0
    steps: int = within(20, least=2, most=64)
    least_s: float = 0.001
    busy_pct: float = 90.0
    clear_at: float = 0.8  # of the threshold

    id: ClassVar[str] = "unmeasured_time"
    severities = ("info",)
    place = Place(Question.IS_IT_FAST, 22)
    reads = (Every(5.0), Events("lines"), *step_shares.READS, UTILIZATION)
    charts = ("phase/other_s", "step_time_s")
    profile_helps = True
    life = Life(clear_s=30.0, restated=True)
    english = Words(
        name="Unmeasured time",
        meaning="Much of the step goes into code that perfagent does not measure: logging, own Python code, sleep.",
        fires=(
            "When at least {share_pct:g} % of the time of the newest ten minutes' steps, and {least_s:g} s a step, is in no "
            "phase. The longest step is left out, and at least {steps} steps are needed. It does not fire while the GPUs "
            "are busy for {busy_pct:g} % of the time, nor while `sync_bound` names the cause."
        ),
        remedies={
            "": (
                'Put `with run.phase("NAME"):` around parts of the loop (run = perfagent.attach()), and each is timed beside '
                "the others. While it trains, `perfagent stacks RUN` shows what it does now, and `perfagent profile RUN` the "
                "operators of some steps. Usual causes: metrics computed in Python, images and histograms that are logged in "
                "every step, printing, and files that are written in the loop."
            ),
            "now and then": (
                "It comes in some steps only: look at what the loop does every so many steps (plots, samples, histograms, "
                'copies of the weights). Put `with run.phase("NAME"):` around it to have it timed, then do it more rarely or '
                "in a thread."
            ),
        },
    )
    chinese = Words(
        name="未测量的时间",
        meaning="训练步中有大量时间花在 perfagent 没有测量的代码上：日志、自己的 Python 代码、sleep。",
        fires=(
            "最近十分钟的训练步中，至少 {share_pct:g} % 的时间且每步至少 {least_s:g} 秒不属于任何阶段时触发。最长的一步"
            "不计，且至少需要 {steps} 步。GPU 忙碌时间达到 {busy_pct:g} % 时，或 `sync_bound` 已指明原因时不触发。"
        ),
        remedies={
            "": (
                '在循环的各部分外加 `with run.phase("NAME"):`（run = perfagent.attach()），即可分别计时。训练期间 '
                "`perfagent stacks RUN` 显示它正在做什么，`perfagent profile RUN` 显示若干步的算子。常见原因：用 Python "
                "计算指标、每步记录图像和直方图、打印，以及在循环中写文件。"
            ),
            "now and then": (
                "只在部分步中出现：检查循环每隔若干步做的事（绘图、采样、直方图、复制权重）。用 "
                '`with run.phase("NAME"):` 计时，然后降低频率或放到线程中。'
            ),
        },
    )

    def judge(self, window: Window) -> Finding | Unknown | None:
        if not window.is_firing(self.id) and self._is_far_off(window):
            return None  # nearly every run ends here
        spent = window.wall.recent()
        other, longest = spent.seconds.get("other", 0.0), spent.longest_s.get("other", 0.0)
        limit = self.share_pct / 100 * (self.clear_at if window.is_firing(self.id) else 1.0)
        if other <= limit * spent.wall_s:
            return None
        if spent.steps < self.steps:
            return UNKNOWN
        share = (other - longest) / (spent.wall_s - longest)
        mean_s = (other - longest) / (spent.steps - 1)
        if share < limit or mean_s < self.least_s or "sync_bound" in window.firing | window.pending:
            return None
        busy = busy_pct(window, window.wall.ended, min(60.0, spent.wall_s))
        if busy is not None and busy >= self.busy_pct:
            return None
        usual_s = _usual_s(window)
        bursts = usual_s < 0.25 * mean_s
        lines = told_lines(window, "lines")
        where = f" Most often the script is in {_named(lines[0])} then." if lines else ""
        return self.found(
            "info",
            f"{100 * share:.0f} % of the time goes into code that is not measured",
            f"{100 * share:.0f} % of the time of the newest {spent.steps:,} steps ({spell_s(mean_s)} a step) is in none of the "
            f"phases: {'in some steps only, ' if bursts else ''}it may be logging, own Python code, or sleep.{where}",
            cause="now and then" if bursts else "",
            cost=f"{spell_s(mean_s)} of each step of {spell_s(spent.wall_s / spent.steps)}",
            since_step=window.at,
            evidence={
                "share_pct": 100 * share, "other_s": mean_s, "step_time_s": spent.wall_s / spent.steps,
                "usual_s": usual_s, "longest_s": longest, "steps": spent.steps,
                "gpu_busy_pct": busy, "lines": lines,
            },
        )  # fmt: skip

    def _is_far_off(self, window: Window) -> bool:
        """Whether neither the newest steps nor the whole run come near the threshold: ten minutes cost more to add up."""
        other, took = window.series("phase/other_s"), window.series("step_time_s")
        if other is None or took is None:
            return True
        newest = sum(other.last(64)) / max(sum(took.last(64)), 1e-9)
        return max(newest, window.wall.whole().share("other")) < 0.5 * self.share_pct / 100


def _named(line: dict[str, Any]) -> str:
    function = str(line.get("in", ""))
    return f"{line['line']} ({function})" if function not in ("", "<module>") else str(line["line"])


def _usual_s(window: Window) -> float:
    """Of the newest steps, the seconds in no phase of a usual one."""
    other = window.series("phase/other_s")
    return 0.0 if other is None else median(other.last(64))
