"""What a rule is: one class that says everything about itself, and judges without a clock, a database or the network.

A rule is a frozen dataclass in a file of its own; its fields are its thresholds, with the unit in the name. (Without
slots: they would make a second class of it.) The class declares what the rule reads. The engine builds the window of a
run from what all rules declare, and judges a rule when something came that it wants to be judged on. Everything else
that is known of a rule is derived from here: the catalogue, the order of verdicts, which alerts are one, the marks on
charts, `GET /rules` and docs/reference/rules.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from perfagent.wire import Finding, Severity
from perfagent_server.rules.texts import Language, Text, said, text_of

if TYPE_CHECKING:
    from perfagent_server.rules.window import Window

__all__ = [
    "EVALUATION_LOSS", "USER_ALERT", "Events", "Every", "Input", "Life", "Question", "Rule", "Series", "unit_of", "within",
]  # fmt: skip

_LEAST_OFF_S = 60.0  # of a level, before its alert is resolved: a window of fast steps is over in a second
USER_ALERT = "user_alert"
"""The rule's id in findings that a user's script made with run.alert()."""
EVALUATION_LOSS = "val/loss"
"""A rule that reads it gets the first loss of an evaluation that the run logs, by whatever name (`val_loss`,
`eval/loss`)."""
Merge = Literal["mean", "median", "min", "max", "sum", "root of sum"]


@dataclass(frozen=True, slots=True)
class Series:
    """A series that a rule reads.

    name: as on the wire; one that ends with "/" is a family, and stands for all names that begin so. axis: "step", or
    "time" for what samplers send. ranks: "merged" is one value for all ranks, by `merge`; "apart" keeps a row for each
    rank. keep: how many steps, or seconds, are kept. judged: the rule is judged at each new step (on the time axis: at
    each new reading). part_of: the series that rules read instead, when ranks send parts of it; a step of which a part
    is missing is left out.
    """

    name: str
    keep: int = 64
    merge: Merge = "mean"
    axis: Literal["step", "time"] = "step"
    ranks: Literal["merged", "apart"] = "merged"
    judged: bool = False
    part_of: str = ""

    @property
    def is_family(self) -> bool:
        return self.name.endswith("/")


@dataclass(frozen=True, slots=True)
class Events:
    """Events of this kind: the rule is judged when one comes. "contact" is the server's own: a rank fell silent, or was
    heard again. keep: how many of them the window keeps."""

    kind: str
    keep: int = 64


@dataclass(frozen=True, slots=True)
class Every:
    """The rule is judged by the server's clock, this often, for as long as the run goes on."""

    seconds: float


Input = Series | Events | Every


class Unknown:
    """The answer of a rule that has not seen enough to judge: at the start of a run, or when the server was started
    again and the steps before are not kept. An open alert then stays as it is."""


UNKNOWN = Unknown()


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """The life of a rule's alert.

    for_steps, for_s: how long a finding must hold before it fires; clear_steps, clear_s: how long it must be gone
    before it is resolved (both must pass); cooldown_steps, cooldown_s: within either, a new firing reopens the old
    alert. outlives_run: stays open when the run ends, because it says why the run ended or what it is worth. restated:
    every finding describes the present as a whole (a share over the last steps, which ranks are silent), so the newest
    replaces the first. Findings of other rules are about a moment: of a NaN, the first step is what people look for.
    is_level: a level is compared, which may hover around its threshold (Rule.level).
    """

    for_steps: int = 0
    for_s: float = 0.0
    clear_steps: int = 0
    clear_s: float = 0.0
    cooldown_steps: int = 100
    cooldown_s: float = 600.0
    outlives_run: bool = False
    restated: bool = False
    is_level: bool = False


class Question(IntEnum):
    """The questions of a verdict, in the order in which they are asked. Sick comes before slow: a run that trains on
    NaN has no use for advice on its loader."""

    IS_IT_DEAD = 1
    ARE_ITS_NUMBERS_FINITE = 2
    DOES_IT_MOVE = 3
    DOES_IT_LEARN = 4
    WILL_IT_GO_ON = 5
    IS_IT_FAST = 6


def within(default: float, *, least: float = 0, most: float) -> Any:
    """A threshold with bounds of its own: one that counts in a window may be no more than the window keeps, or the rule
    would never fire. What other thresholds may be, `bounds_of` of the catalogue says."""
    return field(default=default, metadata={"bounds": (least, most)})


class Rule:
    """The base of all rules.

    severities: those that its findings may have. question: the verdict's question that it answers; after: rules of the
    same question that come before it in a verdict, because they name a cause of what it finds, or say more. reads: its
    inputs. charts: the series on whose charts its alert is
    marked, the first that the run has. joins: rules whose open alert takes this one in; same_step: only if both began
    in one step. asks_for: the command that every rank of the run gets when its alert fires. profile_helps: a profile of
    some steps shows what it is about, so a project may have one taken when its alert fires. state_version: a rule that
    keeps a state of its own (`window.state_of(rule)`) counts this up when its form changes; an older state is dropped.
    needs_card: it reads what only a GPU sends, so it was tested on recorded or made-up series and claims no precision.
    level: of a rule that compares a level, the threshold that says over how many steps or seconds: its alert opens when
    the level has held for that long again, and is resolved, or changes its severity, when it was off for as long.
    own_text: what a rule from outside this package says; what the others say stands in rules/texts.
    """

    id: ClassVar[str]
    severities: ClassVar[tuple[Severity, ...]]
    question: ClassVar[Question]
    after: ClassVar[tuple[str, ...]] = ()
    reads: ClassVar[tuple[Input, ...]]
    charts: ClassVar[tuple[str, ...]] = ()
    life: ClassVar[Life] = Life()
    joins: ClassVar[tuple[str, ...]] = ()
    same_step: ClassVar[bool] = False
    asks_for: ClassVar[str] = ""
    profile_helps: ClassVar[bool] = False
    needs_card: ClassVar[bool] = False
    level: ClassVar[str] = ""
    state_version: ClassVar[int] = 1
    urgent: ClassVar[Literal["", "loss", "gradient"]] = ""
    """The kind of non-finite value at which it is judged at once: other ranks are not awaited."""
    own_text: ClassVar[Text | None] = None

    def judge(self, window: Window) -> Finding | Unknown | None:
        """Returns what is wrong at window.at, or None if nothing is. UNKNOWN if the rule has not seen enough."""
        raise NotImplementedError

    def text(self, language: Language = "en") -> Text:
        return self.own_text or text_of(self.id, language)

    def found(self, severity: Severity, *, cause: str = "", **rest: Any) -> Finding:
        """A finding of this rule, in English. cause: a key of its texts; evidence: the figures of its sentences. (Thresholds
        are none: what is stored must be enough to say it again in another language.)"""
        words = said(self.text(), cause, rest.get("evidence", {}))
        return Finding(
            rule=self.id, severity=severity, message=words.message, fix=words.fix, title=words.title, cause=cause,
            cost=words.cost, **rest,
        )  # fmt: skip

    def held_life(self) -> Life:
        """The life of its alert, with how long a level must hold."""
        if not self.level:
            return self.life
        window, life = getattr(self, self.level), self.life
        clear_s = max(life.clear_s, _LEAST_OFF_S)
        if unit_of(self.level) == "s":
            return replace(life, is_level=True, for_s=max(life.for_s, window), clear_s=max(clear_s, window))
        for_steps, clear_steps = max(life.for_steps, window), max(life.clear_steps, window)
        return replace(life, is_level=True, for_steps=for_steps, clear_steps=clear_steps, clear_s=clear_s)

    def thresholds(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]  # all rules are dataclasses


_UNITS = {
    "pct": "%",
    "bytes": "B",
    "mib": "MiB",
    "gb": "GB",
    **{name: name for name in ("s", "steps", "times", "values")},
}


def unit_of(threshold: str) -> str:
    """The unit in a threshold's name: "%" of `warning_pct`; "" when it is a bare number."""
    return _UNITS.get(threshold.rpartition("_")[2], "")
