"""The verdict of a run in which no rule found anything. Its sentence states how long a step takes, and that figure is
the one that tiles and tables show (`runs/figures.py`): whoever answers with the verdict gives it in. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from perfagent.wire import Finding, Severity, Timing
from perfagent_server.rules.evidence import spell_s

__all__ = ["ELSEWHERE_REMEDY", "MOST", "Healthy"]

ELSEWHERE_REMEDY = (
    'Put `with run.phase("NAME"):` around parts of the loop (run = perfagent.attach()), and each is timed beside the others. '
    "While it trains, `perfagent profile RUN` shows the operators of some steps, and `perfagent stacks RUN` what it does now."
)
"""For a run that no rule finds anything in, and most of whose step no phase accounts for."""
MOST = 0.5
"""Of a step, where its time went: more than all the rest together."""


@dataclass(slots=True, kw_only=True)
class Healthy(Finding):
    """A healthy verdict that does not know yet how long a step takes.

    opening, facts: what its sentence says, without and with numbers; closing: what it adds. tense: is, or was when the
    run has ended. is_elsewhere: no phase accounts for most of the newest steps, which the sentence then says.
    """

    rule: str = "healthy"
    severity: Severity = "info"
    message: str = ""
    opening: str
    facts: list[str] = field(default_factory=list)
    closing: str = ""
    tense: str = "is"
    is_elsewhere: bool = False

    def __post_init__(self) -> None:
        self.message = self._sentence(self.opening, self.facts)

    def with_figures(self, timing: Timing) -> Finding:
        """The verdict as people read it."""
        opening, facts, fix, evidence = self.opening, list(self.facts), self.fix, dict(self.evidence)
        took, elsewhere = timing.series.get("step_time_s"), timing.shares.get("other", 0.0)
        if took is not None and facts:
            facts.append(f"{spell_s(took.p50)} a step (median of {timing.window})")
        if self.is_elsewhere and elsewhere >= MOST:
            share = f"{100 * elsewhere:.0f} %"
            opening = f"Most of the step ({share}) {self.tense} outside of data, forward, backward and optimizer"
            evidence["other_share_pct"], fix = 100 * elsewhere, ELSEWHERE_REMEDY
        message = self._sentence(opening, facts)
        return Finding(rule=self.rule, severity=self.severity, message=message, evidence=evidence, fix=fix)

    def _sentence(self, opening: str, facts: list[str]) -> str:
        return f"{opening}{': ' if facts else ''}{', '.join(facts)}.{self.closing}"
