"""The verdict of a run in which no rule found anything. Its sentence states how long a step takes, and that figure is
the one that tiles and tables show (`runs/figures.py`): whoever answers with the verdict gives it in. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from perfagent.wire import Finding, Severity, StepWindow, Timing
from perfagent_server.rules.texts import Language, grammar_of, sentence

__all__ = ["Healthy"]


@dataclass(slots=True, kw_only=True)
class Healthy(Finding):
    """A healthy verdict that does not know yet how long a step takes.

    opening: the name of its first sentence; facts: what follows it, with numbers; remarks: sentences after it.
    """

    rule: str = "healthy"
    severity: Severity = "info"
    message: str = ""
    language: Language
    opening: str
    facts: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.title = sentence(self.opening, self.language)
        self.message = self._sentences(self.facts)

    def with_figures(self, timing: Timing) -> Finding:
        """The verdict as people read it."""
        facts, took = list(self.facts), timing.series.get("step_time_s")
        if took is not None and timing.window is not None and facts:
            window = _spell(timing.window, self.language)
            facts.append(sentence("step_time", self.language, step_time_s=took.p50, window=window))
        return Finding(
            rule=self.rule,
            severity=self.severity,
            title=self.title,
            message=self._sentences(facts),
            evidence=self.evidence,
            fix=self.fix,
        )

    def _sentences(self, facts: list[str]) -> str:
        return grammar_of(self.language).gap.join(
            [sentence("facts", self.language, opening=self.title, facts=facts), *self.remarks]
        )


def _spell(window: StepWindow, language: Language) -> str:
    if window.whole_run:
        return sentence("whole_run", language)
    return sentence("newest_steps", language, steps=window.steps)
