"""The verdict of a run in which no rule found anything. Its sentence states how long a step takes, and that figure is
the one that tiles and tables show (`runs/figures.py`): whoever answers with the verdict gives it in. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from perfagent.wire import Finding, Severity, Timing
from perfagent_server.rules.spelling import spell_s

__all__ = ["Healthy"]


@dataclass(slots=True, kw_only=True)
class Healthy(Finding):
    """A healthy verdict that does not know yet how long a step takes.

    opening, facts: what its sentence says, without and with numbers; remarks: sentences after it.
    """

    rule: str = "healthy"
    severity: Severity = "info"
    message: str = ""
    opening: str
    facts: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.title = self.opening
        self.message = self._sentences(self.facts)

    def with_figures(self, timing: Timing) -> Finding:
        """The verdict as people read it."""
        facts, took = list(self.facts), timing.series.get("step_time_s")
        if took is not None and facts:
            facts.append(f"{spell_s(took.p50)} a step (median of {timing.window})")
        return Finding(
            rule=self.rule,
            severity=self.severity,
            title=self.title,
            message=self._sentences(facts),
            evidence=self.evidence,
            fix=self.fix,
        )

    def _sentences(self, facts: list[str]) -> str:
        first = f"{self.opening}{': ' if facts else ''}{', '.join(facts)}."
        return " ".join([first, *self.remarks])
