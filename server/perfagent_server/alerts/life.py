"""The life of an alert: pending → firing → resolved, with persistence, hysteresis and cool-down. Pure: time is an argument.

One machine per rule and attempt. The ranks of a finding are grouped by the rule itself, so 512 ranks are one machine. A
machine that was resolved and fires again within its cool-down opens the same alert again, silently: a value that flaps at a
threshold is one alert, told once and resolved once. After the cool-down it is a new alert with a new id.

The id is derived from what the alert is about, not drawn: judging the same data again (after a kill) names the same alert.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, Literal

from perfagent.wire import SEVERITIES, Finding

__all__ = ["Change", "Life", "Machine", "worse"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """for_steps, for_s: how long a finding must hold before it fires; clear_steps, clear_s: how long it must be gone before
    it is resolved (both must pass); cooldown_steps, cooldown_s: within either, a new firing reopens the old alert.
    outlives_run: stays open when the run ends, because it says why the run ended or what it is worth."""

    for_steps: int = 0
    for_s: float = 0.0
    clear_steps: int = 0
    clear_s: float = 0.0
    cooldown_steps: int = 100
    cooldown_s: float = 600.0
    outlives_run: bool = False


@dataclass(slots=True)
class Change:
    """What happened to an alert. kind: fire (new), reopen (same alert again, silently), update (severity, ranks or lead
    changed), resolve."""

    kind: Literal["fire", "reopen", "update", "resolve"]
    alert: str
    finding: Finding
    step: int
    time: float
    why: str = ""


@dataclass(slots=True)
class Machine:
    """The state of one rule in one attempt. finding: the one that fired; hits: steps judged with, out of `judged`, a finding."""

    rule: str
    state: Literal["inactive", "pending", "firing"] = "inactive"
    alert: str = ""
    count: int = 0  # alerts so far in this attempt
    since_step: int = 0
    since: float = 0.0
    hit_step: int = 0
    hit: float = 0.0
    misses: int = 0
    resolved_step: int | None = None
    resolved: float | None = None
    absorbed: bool = False  # the alert belongs to another machine, which leads
    hits: int = 0
    judged: int = 0
    open_at_end: bool = False  # it was firing when the run ended
    missed_step: int = -1  # the newest step that was judged without a finding
    finding: Finding | None = None

    def observe(self, life: Life, found: Finding | None, step: int, now: float, seed: str) -> Change | None:
        """Takes one judgement. seed: run and attempt, from which the alert's id is derived."""
        self.judged += 1
        if found is None:
            return self._miss(life, step, now)
        self.hits += 1
        self.misses = 0
        self.hit_step, self.hit = max(step, self.hit_step), now
        if self.state == "firing":
            return self._grow(found, step, now)
        if self.state == "inactive":
            self.state, self.since_step, self.since = "pending", step, now
        if step - self.since_step < life.for_steps or now - self.since < life.for_s:
            return None
        self.state = "firing"
        again = self.alert and self._cooling(life, step, now)
        if again and self.finding is not None:
            return Change("reopen", self.alert, self.finding, step, now)
        self.count += 1
        self.alert = "al_" + hashlib.sha256(f"{seed}\n{self.rule}\n{self.count}".encode()).hexdigest()[:20]
        self.finding = found
        self.absorbed = False
        return Change("fire", self.alert, found, step, now)

    def close(self, step: int, now: float, why: str) -> Change | None:
        """Resolves an open alert for a reason outside the rule: the run ended, somebody did it by hand."""
        if self.state == "pending":
            self.state = "inactive"
        if self.state != "firing" or self.finding is None:
            return None
        self.state, self.resolved_step, self.resolved, self.misses = "inactive", step, now, 0
        return None if self.absorbed else Change("resolve", self.alert, self.finding, step, now, why)

    def _miss(self, life: Life, step: int, now: float) -> Change | None:
        if self.state == "pending":
            self.state = "inactive"
        if self.state != "firing" or step < self.hit_step:
            return None  # a step before the one that fired was judged later: it says nothing about what came after
        if step <= self.missed_step and life.clear_steps:
            return None  # counted already: a rule on several series judges a step once for each of them
        self.missed_step = max(step, self.missed_step)
        self.misses += 1
        if self.misses < life.clear_steps or now - self.hit < life.clear_s:
            return None
        return self.close(step, now, "it is over")

    def _cooling(self, life: Life, step: int, now: float) -> bool:
        if self.resolved is None or self.resolved_step is None:
            return False
        return step - self.resolved_step < life.cooldown_steps or now - self.resolved < life.cooldown_s

    def _grow(self, found: Finding, step: int, now: float) -> Change | None:
        """The same finding with more ranks or a higher severity: the alert row says so, nobody is told twice."""
        known = self.finding
        if known is None:
            return None
        ranks = sorted({*known.ranks, *found.ranks})
        if ranks == known.ranks and not worse(found.severity, known.severity):
            return None
        known.ranks = ranks
        if found.since_step == known.since_step:
            known.message = found.message  # names the ranks
        if worse(found.severity, known.severity):
            known.severity, known.message, known.gain_pct = found.severity, found.message, found.gain_pct
            known.evidence = {**found.evidence}
        return None if self.absorbed else Change("update", self.alert, known, step, now)

    def snapshot(self) -> list[Any]:
        kept = self.finding
        return [getattr(self, name) for name in _SAVED] + [
            None if kept is None else {name: getattr(kept, name) for name in Finding.__dataclass_fields__}
        ]

    @classmethod
    def restore(cls, state: list[Any]) -> Machine:
        *values, finding = state
        machine = cls(**dict(zip(_SAVED, values, strict=False)))  # an older server kept fewer
        machine.finding = None if finding is None else Finding(**finding)
        return machine


_SAVED = tuple(name for name in Machine.__dataclass_fields__ if name != "finding")


def worse(one: str, other: str) -> bool:
    """Whether the first severity is higher than the second."""
    order: tuple[str, ...] = SEVERITIES
    return order.index(one) > order.index(other)
