"""Every rule that there is, in the order of judging: what is worse, or the cause of the other, first."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, ClassVar, Protocol

from perfagent.wire import Finding
from perfagent_server.alerts.life import Life
from perfagent_server.rules.gradients import NonfiniteGradient
from perfagent_server.rules.liveness import LostContact, ProcessCrash
from perfagent_server.rules.loss import LossSpike, NonfiniteLoss
from perfagent_server.rules.memory import OomObserved
from perfagent_server.rules.utilization import DataBound, LowGpuUtilization
from perfagent_server.rules.window import Window

__all__ = ["RULES", "Rule", "describe"]


class Rule(Protocol):
    """A frozen dataclass of thresholds with a pure judgement. id: as in INTERFACES; on: the series (or "state",
    "contact") at whose every new step it is judged; urgent: the kind of non-finite value that has it judged at once,
    ranks not awaited."""

    id: ClassVar[str]
    on: ClassVar[tuple[str, ...]]
    urgent: ClassVar[str]
    life: ClassVar[Life]

    def judge(self, window: Window) -> Finding | None:
        """What is wrong at window.at, or None: nothing, or not enough is known. No clock, database or network."""


RULES: tuple[Rule, ...] = (
    OomObserved(),
    ProcessCrash(),
    NonfiniteLoss(),
    NonfiniteGradient(),
    LossSpike(),
    LostContact(),
    DataBound(),
    LowGpuUtilization(),
)


def describe(rule: Rule) -> dict[str, Any]:
    """A rule as GET /rules shows it: its thresholds, and what it means in its own words."""
    words = " ".join((type(rule).__doc__ or "").split())
    thresholds = {item.name: getattr(rule, item.name) for item in fields(rule)}  # type: ignore[arg-type]  # all are dataclasses
    life = {item.name: getattr(rule.life, item.name) for item in fields(rule.life)}
    return {"rule": rule.id, "description": words, "reads": list(rule.on), "thresholds": thresholds, "life": life}
