"""What the rules of a run read, put together: which series the window keeps, and which rule is judged on what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from perfagent.wire import LOSS, loss_kind
from perfagent_server.rules.rule import Events, Every, Rule, Series

__all__ = ["Columns", "Kept", "Plan"]

_NAMED_LOSS = Series("", keep=64)  # `loss/kl`, `g_loss`: only looked at for values that are no numbers
_MOST_COLUMNS = 1000


@dataclass(frozen=True, slots=True)
class Kept:
    """What is kept of one series. merged: over steps, ranks put together; apart: over steps, a row for each rank; time:
    over time; family: its prefix, when it is kept as a row of its family."""

    merged: Series | None = None
    apart: Series | None = None
    time: Series | None = None
    family: Series | None = None


@dataclass(frozen=True, slots=True)
class Columns:
    """What is wanted of a group with these names. losses: training losses by other names than `loss`."""

    merged: tuple[str, ...]
    apart: tuple[tuple[str, int], ...]
    time: tuple[tuple[str, Series], ...]
    families: tuple[tuple[Series, tuple[str, ...]], ...]
    losses: tuple[str, ...]

    @property
    def is_wanted(self) -> bool:
        """Whether any rule reads any of it."""
        return bool(self.merged or self.apart or self.time or self.families)


class Plan:
    """Made once for a set of rules. Raises ValueError when two rules put the ranks of a series together differently.

    on_step: name of a series, or prefix of a family, -> rules that are judged at each of its new steps; on_time: the
    same at each new reading; on_event: kind -> rules; clocked: rules with the seconds between two judgements; urgent:
    kind of non-finite value -> the rule that is judged at once.
    """

    def __init__(self, rules: Sequence[Rule]) -> None:
        self.rules = {rule.id: rule for rule in rules}
        self.on_step: dict[str, tuple[Rule, ...]] = {}
        self.on_time: dict[str, tuple[Rule, ...]] = {}
        self.on_event: dict[str, tuple[Rule, ...]] = {}
        self.clocked: tuple[tuple[float, Rule], ...] = ()
        self.urgent: dict[str, Rule] = {rule.urgent: rule for rule in rules if rule.urgent}
        self._merged: dict[str, Series] = {}
        self._apart: dict[str, Series] = {}
        self._time: dict[str, Series] = {}
        self._families: dict[str, Series] = {}
        for rule in rules:
            for one in rule.reads:
                self._add(rule, one)
        self.order = {name: place for place, name in enumerate(self._merged)}
        """Judged first within a frame: what the rules on the later ones look up. The loss comes last."""
        self._columns: dict[tuple[str, ...], Columns] = {}

    def kept(self, name: str) -> Kept | None:
        """What is kept of the series of this name; None if nothing is."""
        family = next((series for prefix, series in self._families.items() if name.startswith(prefix)), None)
        merged, apart, time = self._merged.get(name), self._apart.get(name), self._time.get(name)
        if merged is None and apart is None and time is None and family is None:
            return None
        return Kept(merged, apart, time, family)

    def columns(self, names: tuple[str, ...]) -> Columns:
        """What is wanted of a group with these names; groups of a run have the same names again and again."""
        found = self._columns.get(names)
        if found is None:
            if len(self._columns) >= _MOST_COLUMNS:
                self._columns.clear()
            found = self._columns[names] = self._choose(names)
        return found

    def _choose(self, names: tuple[str, ...]) -> Columns:
        kept = [(name, one) for name in names if (one := self.kept(name)) is not None]
        families: dict[Series, list[str]] = {}
        for name, one in kept:
            if one.family is not None:
                families.setdefault(one.family, []).append(name)
        return Columns(
            merged=tuple(name for name, one in kept if one.merged is not None),
            apart=tuple((name, one.apart.keep) for name, one in kept if one.apart is not None),
            time=tuple((name, one.time) for name, one in kept if one.time is not None),
            families=tuple((family, tuple(members)) for family, members in families.items()),
            losses=tuple(name for name in names if name != LOSS and not self.is_signal(name) and loss_kind(name)),
        )

    def of_loss(self, name: str) -> Series:
        """How a loss by another name than `loss` is kept: the whole loss of a script as `loss` itself."""
        whole = self._merged.get(LOSS)
        return whole if whole is not None and loss_kind(name) == "whole" else _NAMED_LOSS

    def part_of(self, name: str) -> str:
        """The series that rules read where ranks send parts of it, else the name itself."""
        series = self._merged.get(name)
        return series.part_of or name if series is not None else name

    def is_signal(self, name: str) -> bool:
        """Whether a rule reads this very series over steps."""
        return name in self._merged

    def series_of(self, name: str) -> Series:
        """How a series that is kept with its ranks put together is kept."""
        return self._merged[name] if name in self._merged else self.of_loss(name)

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
        elif isinstance(one, Every):
            self.clocked = (*self.clocked, (one.seconds, rule))
        else:
            places = self._time if one.axis == "time" else self._families if one.is_family else self._merged
            if one.ranks == "apart" and one.axis == "step":
                places = self._apart
            places[one.name] = _joined(places.get(one.name), one)
            if one.judged:
                judged = self.on_time if one.axis == "time" else self.on_step
                judged[one.name] = (*judged.get(one.name, ()), rule)


def _joined(known: Series | None, other: Series) -> Series:
    """One plan for two rules that read the same series."""
    if known is None:
        return other
    if (known.merge, known.ranks, known.part_of) != (other.merge, other.ranks, other.part_of):
        raise ValueError(f"two rules put the ranks of {known.name!r} together differently: {known}, {other}")
    return known if known.keep >= other.keep else other
