"""What the rules of a run read, put together: which series the window keeps, and which rule is judged on what."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from perfagent.wire import LOSS, is_evaluation_loss, loss_kind
from perfagent_server.rules.nonfinite_steps import GRADIENTS
from perfagent_server.rules.own_alert import OwnAlert
from perfagent_server.rules.own_series import Watched, watched
from perfagent_server.rules.rule import EVALUATION_LOSS, Events, Every, Rule, Series

__all__ = ["STEPPED", "Column", "Columns", "Plan"]

STEPPED = (LOSS, "lr")
"""The window itself takes a note of each of their steps."""
_NAMED_LOSS = Series("", keep=64)  # `loss/kl`, `g_loss`: only looked at for values that are no numbers
_MOST_COLUMNS = 1000
_STEP_TIME = "step_time_s"


@dataclass(frozen=True, slots=True)
class Column:
    """One series of a group. place: of its name in the group; shown: the series that rules read: its own, or the one
    that it is a part of; noted: where its non-finite values are noted, "loss", "gradient" or ""."""

    name: str
    place: int
    shown: str
    noted: str
    plan: Series


@dataclass(frozen=True, slots=True)
class Columns:
    """What is wanted of a group with these names. named_losses: training losses by other names than `loss`; apart,
    families: with the places of their names in the group; step_time: its place, if it is in the group; phases: those
    of all phases, also of those that the script named; places: of all names that are wanted; own: what users' own alerts
    watch, whose places are not among those."""

    merged: tuple[Column, ...]
    apart: tuple[tuple[str, ...], tuple[int, ...]]
    time: tuple[Column, ...]
    families: tuple[tuple[Series, tuple[str, ...], tuple[int, ...]], ...]
    named_losses: tuple[Column, ...]
    step_time: int | None
    phases: tuple[tuple[str, int], ...]
    places: tuple[int, ...]
    own: tuple[Watched, ...] = ()

    @property
    def is_wanted(self) -> bool:
        """Whether any rule reads any of it."""
        return bool(self.merged or self.apart[0] or self.time or self.families or self.step_time is not None)


class Plan:
    """Made once for a set of rules. Raises ValueError when two rules put the ranks of a series together differently.

    on_step: name of a series, or prefix of a family, -> rules that are judged at each of its new steps; on_time: the
    same at each new reading; on_event: kind -> rules; events: kind -> how many are kept; clocked: rules with the seconds
    between two judgments; urgent: kind of non-finite value -> the rule that is judged at once; own: users' own alerts;
    time: series that are kept over time; families: those of which each series is a row, by prefix.
    """

    def __init__(self, rules: Sequence[Rule]) -> None:
        self.rules = {rule.id: rule for rule in rules}
        self.lives = {rule.id: rule.held_life() for rule in rules}
        self.own = {rule.id: rule for rule in rules if isinstance(rule, OwnAlert)}
        self.on_step: dict[str, tuple[Rule, ...]] = {}
        self.on_time: dict[str, tuple[Rule, ...]] = {}
        self.on_event: dict[str, tuple[Rule, ...]] = {}
        self.events: dict[str, int] = {}
        self.clocked: tuple[tuple[float, Rule], ...] = ()
        self.urgent: dict[str, Rule] = {rule.urgent: rule for rule in rules if rule.urgent}
        self._merged: dict[str, Series] = {}
        self._apart: dict[str, Series] = {}
        self.time: dict[str, Series] = {}
        self.families: dict[str, Series] = {}
        for rule in rules:
            for one in rule.reads:
                self._add(rule, one)
        self.order = {name: place for place, name in enumerate(self._merged)}
        """Judged first within a frame: what the rules on the later ones look up. The loss comes last."""
        self._columns: dict[tuple[str, ...], Columns] = {}

    def columns(self, names: tuple[str, ...]) -> Columns:
        """What is wanted of a group with these names; groups of a run have the same names again and again."""
        found = self._columns.get(names)
        if found is None:
            if len(self._columns) >= _MOST_COLUMNS:
                self._columns.clear()
            found = self._columns[names] = self._choose(names)
        return found

    def _choose(self, names: tuple[str, ...]) -> Columns:
        merged, time, losses, apart = [], [], [], {}
        families: dict[Series, dict[str, int]] = {}
        for place, name in enumerate(names):
            if name in self._merged:
                merged.append(Column(name, place, self.part_of(name), _noted(name), self._merged[name]))
            elif self.is_evaluation(name):
                merged.append(Column(name, place, EVALUATION_LOSS, "", self._merged[EVALUATION_LOSS]))
            elif name != LOSS and loss_kind(name):
                losses.append(Column(name, place, name, "loss", self.of_loss(name)))
            if name in self._apart:
                apart[name] = place
            if name in self.time:
                time.append(Column(name, place, name, "", self.time[name]))
            family = next((series for prefix, series in self.families.items() if name.startswith(prefix)), None)
            if family is not None:
                families.setdefault(family, {})[name] = place
        of_families = (place for found in families.values() for place in found.values())
        columns = (*merged, *time, *losses)
        step_time = names.index(_STEP_TIME) if _STEP_TIME in names else None
        phases = tuple(_phases(names))
        of_steps = [place for _, place in phases] if step_time is None else [step_time, *(place for _, place in phases)]
        return Columns(
            merged=tuple(merged),
            apart=(tuple(apart), tuple(apart.values())),
            time=tuple(time),
            families=tuple((family, tuple(found), tuple(found.values())) for family, found in families.items()),
            named_losses=tuple(losses),
            step_time=step_time,
            phases=phases,
            places=tuple(sorted({*(one.place for one in columns), *apart.values(), *of_families, *of_steps})),
            own=watched(names, [*self.own.values()]),
        )

    @property
    def apart(self) -> dict[str, int]:
        """The series that are kept with a row for each rank, and how many steps of each."""
        return {name: series.keep for name, series in self._apart.items()}

    def of_loss(self, name: str) -> Series:
        """How a loss by another name than `loss` is kept: the whole loss of a script as `loss` itself."""
        whole = self._merged.get(LOSS)
        return whole if whole is not None and loss_kind(name) == "whole" else _NAMED_LOSS

    def part_of(self, name: str) -> str:
        """The series that rules read where ranks send parts of it, else the name itself."""
        series = self._merged.get(name)
        if series is not None:
            return series.part_of or name
        return EVALUATION_LOSS if self.is_evaluation(name) else name

    def is_evaluation(self, name: str) -> bool:
        """Whether it is the loss of an evaluation, by whatever name, and a rule reads that."""
        return EVALUATION_LOSS in self._merged and is_evaluation_loss(name)

    def is_signal(self, name: str) -> bool:
        """Whether a rule reads this very series over steps."""
        return name in self._merged

    def is_judged(self, name: str) -> bool:
        """Whether the steps of a series are gone through one by one."""
        return name in self.on_step or name in STEPPED or bool(loss_kind(name))

    def series_of(self, name: str) -> Series:
        """How a series that is kept with its ranks put together is kept."""
        if name in self._merged:
            return self._merged[name]
        return self._merged[EVALUATION_LOSS] if self.is_evaluation(name) else self.of_loss(name)

    def rules_on(self, name: str, run_loss: str | None) -> tuple[Rule, ...]:
        """The rules that are judged at each new step of a series. run_loss: the series that is the loss of the run;
        others of its kind are only looked at for values that are no numbers."""
        if name in self.on_step:
            return self.on_step[name]
        if name == run_loss:
            return self.on_step.get(LOSS, ())
        rule = self.urgent.get("loss") if loss_kind(name) else None
        return () if rule is None else (rule,)

    def _add(self, rule: Rule, one: Series | Events | Every) -> None:
        if isinstance(one, Events):
            self.on_event[one.kind] = (*self.on_event.get(one.kind, ()), rule)
            self.events[one.kind] = max(one.keep, self.events.get(one.kind, 0))
        elif isinstance(one, Every):
            self.clocked = (*self.clocked, (one.seconds, rule))
        else:
            places = self.time if one.axis == "time" else self.families if one.is_family else self._merged
            if one.ranks == "apart" and one.axis == "step":
                places = self._apart
            places[one.name] = _joined(places.get(one.name), one)
            if one.judged:
                judged = self.on_time if one.axis == "time" else self.on_step
                judged[one.name] = (*judged.get(one.name, ()), rule)


def _phases(names: tuple[str, ...]) -> Iterator[tuple[str, int]]:
    for place, name in enumerate(names):
        if name.startswith("phase/") and name.endswith("_s"):
            yield name[len("phase/") : -len("_s")], place


def _noted(name: str) -> str:
    return "gradient" if name in GRADIENTS else "loss" if loss_kind(name) else ""


def _joined(known: Series | None, other: Series) -> Series:
    """One plan for two rules that read the same series."""
    if known is None:
        return other
    if known.axis == "time" and known.ranks != other.ranks:  # what is kept apart can be put together when it is read
        return replace(known if known.ranks == "apart" else other, keep=max(known.keep, other.keep))
    if (known.merge, known.ranks, known.part_of) != (other.merge, other.ranks, other.part_of):
        raise ValueError(f"two rules put the ranks of {known.name!r} together differently: {known}, {other}")
    return known if known.keep >= other.keep else other
