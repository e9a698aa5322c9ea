"""unchanged_tensor: some trainable parameters do not move while others do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from perfagent.wire import Finding
from perfagent.wire.limits import whole
from perfagent_server.rules.model.parameter_events import PARAMETERS, names_in, newest
from perfagent_server.rules.rule import UNKNOWN, Life, Question, Rule, Series, Unknown, within
from perfagent_server.rules.window import Noted, Window

__all__ = ["UnchangedTensor"]

_SHARE = "update/unmoved_share"
_MOSTLY = 0.5


@dataclass(frozen=True, kw_only=True)
class UnchangedTensor(Rule):
    """SageMaker Debugger's UnchangedTensor compares three times within a tolerance; here every number of a sample must
    be the same, bit by bit. If nothing at all moves, that is another trouble (a learning rate of zero at the end of a
    schedule, `frozen_training`). Experts that got no token stand still in a healthy mixture: a remark.
    """

    share_pct: float = 1.0
    warning_pct: float = 10.0
    observations: int = within(2, least=1, most=4)
    clear_at: float = 0.8  # of the threshold

    id: ClassVar[str] = "unchanged_tensor"
    severities = ("info", "warning")
    question = Question.DOES_IT_LEARN
    after = ("frozen_training",)
    joins = ("dead_units",)
    reads = (PARAMETERS, Series(_SHARE, keep=4, judged=True))
    charts = (_SHARE, "update/ratio")
    life = Life(restated=True)

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
        names, data = ([], {}) if told is None else (names_in(told), told.data)
        steps = whole(data.get("steps")) or 0
        only_experts = bool(names) and all("expert" in name.lower() for name in names)
        return self.found(
            "warning" if share >= self.warning_pct and not only_experts else "info",
            cause=_cause_of(told),
            since_step=max(window.start_step, first - steps),
            evidence={
                "share_pct": share, "parameters": names, "count": whole(data.get("count")), "step": window.at,
                "without_gradient": data.get("without_gradient"), "without_rate": data.get("without_rate"),
                "comparisons": self.observations, "steps": steps,
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
