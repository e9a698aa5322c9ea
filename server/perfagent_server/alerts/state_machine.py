"""The life of an alert: pending → firing → resolved, with persistence, hysteresis and cool-down. Pure: time is an
argument.

One machine per rule and attempt. The ranks of a finding are grouped by the rule itself, so 512 ranks are one machine. A
machine that was resolved and fires again within its cool-down opens the same alert again, which is sent only if it
stays open (tables.py): a value that flaps at a threshold is one alert, of which little is sent. After the cool-down
it is a new alert with a new id.

The alert of a rule that compares a level (Life.is_level) opens, changes its severity and is resolved only when that has
held for a window of the rule.

The id is derived from what fired: the run, its attempt, the rule, and the frame that was judged. So judging the same
data again (after a kill) names the same alert, and no lost state makes an id come again.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, Literal

from perfagent.wire import SEVERITIES, Finding
from perfagent_server.alerts.causes import and_then, title_of
from perfagent_server.rules.rule import Life

__all__ = ["RUN_ENDED", "Change", "Machine", "worse"]

RUN_ENDED = "the run ended"
"""How the reason begins why an alert is over that was open when its run ended."""

_ENOUGH_JUDGED = 10
_REWRITE_S = 60.0  # a row whose figures move a little at every step is written no more often


@dataclass(slots=True)
class Change:
    """What happened to an alert. kind: fire (new), reopen (same alert again), update (severity, ranks, lead or figures
    changed), resolve. opening: the how many-th time that it is open."""

    kind: Literal["fire", "reopen", "update", "resolve"]
    alert: str
    finding: Finding
    step: int
    time: float
    why: str = ""
    opening: int = 1


@dataclass(slots=True)
class Machine:
    """The state of one rule in one attempt. finding: the one that fired, or the newest (Life.restated); coming: the newest
    of an alert that is pending; hits: steps judged with, out of `judged`, a finding."""

    rule: str
    state: Literal["inactive", "pending", "firing"] = "inactive"
    alert: str = ""
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
    opening: int = 1  # how many times the alert was opened, this time included
    written: float = 0.0  # when its row was last written
    leaning_step: int | None = None  # since when findings are more, or less, severe than the alert
    leaning: float = 0.0
    leans_to: int = 0  # 1: more severe, -1: less
    coming: Finding | None = None
    finding: Finding | None = None

    def observe(self, life: Life, found: Finding | None, step: int, now: float, seed: str) -> Change | None:
        """Takes one judgment. seed: run, attempt and the newest frame, from which a new alert's id is derived."""
        self.judged += 1
        if found is None:
            return self._miss(life, step, now)
        self.hits += 1
        self.misses = 0
        gone_steps = step - self.hit_step
        self.hit_step, self.hit = max(step, self.hit_step), now
        if self.state == "firing":
            return self._grow(life, found, step, now)
        if self.state == "inactive":
            self.state, self.since_step, self.since, self.coming = "pending", step, now, None
        if self.coming is not None and life.restated:
            found.since_step, found.since = self.coming.since_step, self.coming.since
        self.coming = found
        if step - self.since_step < life.for_steps or now - self.since < life.for_s:
            return None
        self.state, self.written, self.leans_to, self.coming = "firing", now, 0, None
        # An alert that belonged to the leading machine is that one's to open again.
        if self.alert and not self.absorbed and self._cooling(life, step, now):
            self.opening += 1
            # Closed by hand while the trouble went on, it is still the first finding that says where that began.
            if self.finding is None or life.restated or gone_steps > life.clear_steps:
                self.finding = found
            return self._change("reopen", step, now)
        self.finding, self.opening, self.absorbed = found, 1, False
        self.alert = "al_" + hashlib.sha256(f"{seed}\n{self.rule}".encode()).hexdigest()[:20]
        return self._change("fire", step, now)

    def close(self, step: int, now: float, why: str) -> Change | None:
        """Resolves an open alert for a reason outside the rule: the run ended, somebody did it by hand."""
        if self.state == "pending":
            self.state = "inactive"
        if self.state != "firing" or self.finding is None:
            return None
        self.state, self.resolved_step, self.resolved, self.misses = "inactive", step, now, 0
        return None if self.absorbed else self._change("resolve", step, now, why)

    def held(self) -> Finding | None:
        """The finding of a rule that was firing when the run ended, or held in at least half of the steps it judged. Of a
        few judgments, as of a silence that began and was over, half say nothing of the run."""
        is_held = self.open_at_end or (self.judged >= _ENOUGH_JUDGED and self._is_usual)
        return (self.finding or self.coming) if is_held else None

    def present(self, life: Life) -> Finding | None:
        """The finding that holds now: of an open alert, and of a level whose alert is pending where it is usual for the
        run, as in one that was slow from its beginning."""
        is_coming = self.state == "pending" and life.is_level and self._is_usual
        return self.finding if self.state == "firing" else self.coming if is_coming else None

    @property
    def _is_usual(self) -> bool:
        return 2 * self.hits >= self.judged

    def _miss(self, life: Life, step: int, now: float) -> Change | None:
        if self.state == "pending":
            self.state, self.coming = "inactive", None
        if self.state != "firing" or step < self.hit_step:
            return None  # a step before the one that fired was judged later: it says nothing about what came after
        if step <= self.missed_step and life.clear_steps:
            return None  # counted already: a rule on several series judges a step once for each of them
        self.missed_step = max(step, self.missed_step)
        self.misses += 1
        gone_steps = step - self.hit_step if life.is_level else self.misses
        if gone_steps < life.clear_steps or now - self.hit < life.clear_s:
            return None
        return self.close(step, now, "it is over")

    def _cooling(self, life: Life, step: int, now: float) -> bool:
        if self.resolved is None or self.resolved_step is None:
            return False
        return step - self.resolved_step < life.cooldown_steps or now - self.resolved < life.cooldown_s

    def _change(
        self, kind: Literal["fire", "reopen", "update", "resolve"], step: int, now: float, why: str = ""
    ) -> Change:
        assert self.finding is not None
        return Change(kind, self.alert, self.finding, step, now, why, self.opening)

    def _grow(self, life: Life, found: Finding, step: int, now: float) -> Change | None:
        """One more finding of an open alert. What it changes goes into the alert's row, and no channel is notified
        twice."""
        if self.finding is None:
            return None
        if life.restated:
            grown = self._restate(life, found, step, now)
        elif _is_of_an_earlier_step(found, self.finding, life.cooldown_steps):
            grown = self._begin_earlier(self.finding, found)
        else:
            grown = self._widen(self.finding, found)
        if not grown or self.absorbed:
            return None
        self.written = now
        return self._change("update", step, now)

    def _restate(self, life: Life, found: Finding, step: int, now: float) -> bool:
        """The newest finding replaces the one before, once its severity has held; whether the row is to say so now. The
        trouble began when it first did."""
        known = self.finding
        assert known is not None
        if not self._has_settled(life, known, found, step, now):
            return False
        if found.since_step is None or known.since_step is None or found.since_step >= known.since_step:
            found.since_step, found.since = known.since_step, known.since
        _keep_what_joined(known, found)
        self.finding = found
        if (found.ranks, found.severity, found.cause) != (known.ranks, known.severity, known.cause):
            return True
        return found.message != known.message and now - self.written >= _REWRITE_S

    def _has_settled(self, life: Life, known: Finding, found: Finding, step: int, now: float) -> bool:
        """Whether the alert may have the severity of this finding: a lower one must have held for as long as it takes to
        resolve the alert, and a higher one of a level for as long as it takes to open it."""
        leans_to = worse(found.severity, known.severity) - worse(known.severity, found.severity)
        if leans_to == 0 or (leans_to > 0 and not life.is_level):
            self.leans_to = 0
            return True
        if leans_to != self.leans_to:
            self.leans_to, self.leaning_step, self.leaning = leans_to, step, now
        least_steps, least_s = (life.for_steps, life.for_s) if leans_to > 0 else (life.clear_steps, life.clear_s)
        if step - (self.leaning_step or 0) < least_steps or now - self.leaning < least_s:
            return False
        self.leans_to = 0
        return True

    def _begin_earlier(self, known: Finding, found: Finding) -> bool:
        """A rank whose frame came later shows an earlier beginning than the first frame: in DDP the loss is NaN on
        every rank one step after one rank's gradients spoilt the weights."""
        found.ranks = sorted({*known.ranks, *found.ranks})
        _keep_what_joined(known, found)
        self.finding = found
        return True

    @staticmethod
    def _widen(known: Finding, found: Finding) -> bool:
        """The first finding with more ranks or a higher severity; whether it changed."""
        ranks = sorted({*known.ranks, *found.ranks})
        if ranks == known.ranks and not worse(found.severity, known.severity):
            return False
        known.ranks = ranks
        if found.since_step == known.since_step or found.evidence.get("step", -1) == known.evidence.get("step"):
            fresh = {name: figure for name, figure in found.evidence.items() if figure is not None}
            known.evidence = {**known.evidence, **fresh}  # names the ranks, as its words do
            known.message, known.title = _with_its_cause(found.message, known), found.title
            known.title = title_of(known)
        if worse(found.severity, known.severity):
            _keep_what_joined(known, found)
            known.severity, known.gain_pct = found.severity, found.gain_pct
            known.message, known.title = found.message, found.title
            known.cause, known.fix = found.cause, found.fix
            known.evidence = {**found.evidence}
        return True

    def snapshot(self) -> list[Any]:
        return [*(getattr(self, name) for name in _SAVED), _packed(self.coming), _packed(self.finding)]

    @classmethod
    def restore(cls, state: list[Any]) -> Machine:
        *values, coming, finding = state
        machine = cls(**dict(zip(_SAVED, values, strict=True)))
        machine.coming, machine.finding = _unpacked(coming), _unpacked(finding)
        return machine


_SAVED = tuple(name for name in Machine.__dataclass_fields__ if name not in ("coming", "finding"))


def _packed(finding: Finding | None) -> dict[str, Any] | None:
    return None if finding is None else {name: getattr(finding, name) for name in Finding.__dataclass_fields__}


def _unpacked(state: dict[str, Any] | None) -> Finding | None:
    return None if state is None else Finding(**state)


def _is_of_an_earlier_step(found: Finding, known: Finding, near: int) -> bool:
    """Whether it is about the same series, a little earlier: a loss that the script logs under another name may count
    from 0."""
    if found.since_step is None or known.since_step is None or worse(known.severity, found.severity):
        return False
    same = found.evidence.get("series") == known.evidence.get("series")
    return same and 0 < known.since_step - found.since_step <= near


def _keep_what_joined(known: Finding, found: Finding) -> None:
    """Hands on what is not of the rule: the follower's words (grouping.py), and causes with their sentence and their
    cure (alerts/causes.py)."""
    found.evidence = {
        **found.evidence,
        **{key: known.evidence[key] for key in ("also", "causes") if key in known.evidence},
    }
    cause = _first_cause(known)
    if cause is not None:
        found.message = _with_its_cause(found.message, known)
        if "profile" not in cause:  # a profile shows where the time went; its rule says what to do, and may change it
            found.fix = known.fix


def _with_its_cause(message: str, known: Finding) -> str:
    """The words of a rule, and those of the cause that joined the finding."""
    cause = _first_cause(known)
    return message if cause is None else and_then(message, str(cause.get("message", "")))


def _first_cause(finding: Finding) -> dict[str, Any] | None:
    causes = finding.evidence.get("causes")
    return causes[0] if isinstance(causes, list) and causes and isinstance(causes[0], dict) else None


def worse(one: str, other: str) -> bool:
    """Whether the first severity is higher than the second."""
    order: tuple[str, ...] = SEVERITIES
    return order.index(one) > order.index(other)
