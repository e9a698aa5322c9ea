"""Groups runs, such as the seeds of one setting. For each group: mean and standard deviation of metrics, and a band of a
series. For each run: its settings beside its results."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from sqlalchemy import Select

from perfagent.errors import WireError
from perfagent.wire import OUTCOMES, Series
from perfagent.wire.configuration import divided, flattened
from perfagent_server.database import Database
from perfagent_server.runs.conditions import condition_text
from perfagent_server.runs.goal import Goal, goals_among
from perfagent_server.runs.outcomes import LEVEL
from perfagent_server.runs.run_filters import TableQuery, matching
from perfagent_server.runs.run_table import MOST_COMPARED, setting_of
from perfagent_server.store.interface import MetricStore
from perfagent_server.store.stored_json import stored_names, stored_object
from perfagent_server.store.tables import run as runs

__all__ = ["MOST_DRAWN", "MOST_GROUPS", "Band", "Grouping", "RunGroups", "band_of"]

MOST_GROUPS = 100
"""In a table: the best ones."""
MOST_DRAWN = 20
"""Lines in a chart."""
_MOST_LINES = 20
"""Runs of a group that its band is made of: the newest. Fewer where there are many groups: 4 ms a run."""
_MOST_READ = 120
MOST_ROWS = 300
"""Runs whose settings are shown beside each other: the newest."""
_ASKED_FOR_NAMES = 5  # the newest runs: which series there are
_ASKED_FOR_SETTINGS = 200  # the newest runs: by what one can group
_MOST_SETTINGS = 40
_MOST_RESULTS = 2
_EXACT = 1e15  # a float below it is written out
_SEEDS = frozenset(
    {"seed", "random_seed", "rng_seed", "data_seed", "run_name", "name", "output_dir", "log_dir", "run_id"}
)
"""Settings that differ between runs and mean nothing."""


@dataclass(frozen=True, slots=True)
class Grouping:
    """kind: group, tag or config; name: of the setting."""

    kind: str
    name: str = ""

    @classmethod
    def read(cls, text: str) -> Grouping:
        """Of `group`, `tag`, `config.lr` or `config:lr`. Raises WireError."""
        kind, name = text[:6], text[7:]
        if kind == "config" and text[6:7] in (".", ":") and name:
            return cls(kind, name)
        if text not in ("group", "tag"):
            raise WireError(f"by is {text[:80]!r}; allowed are group, tag and config.NAME, such as config.lr")
        return cls(text)

    @property
    def spelled(self) -> str:
        return f"config.{self.name}" if self.name else self.kind

    def labels(self, row: Any, config: Mapping[str, Any]) -> list[str | None]:
        """Of the groups that a run is in: one for each of its tags. None: it has no group, no tag, not this setting."""
        if self.kind == "tag":
            return [*dict.fromkeys(stored_names(row.tags))] or [None]
        if self.kind == "group":
            return [row.group_name or None]
        return [_label(setting_of(config, self.name))]


@dataclass(frozen=True, slots=True)
class _Member:
    id: str
    name: str
    state: str
    level: int
    labels: list[str | None]


@dataclass(slots=True)
class Band:
    """Several runs as one line. mean, low, high: of their values at a step; between its samples a run moves evenly. runs: how
    many have come so far."""

    step: list[int]
    mean: list[float]
    low: list[float]
    high: list[float]
    runs: list[int]


class RunGroups:
    def __init__(self, database: Database, store: MetricStore) -> None:
        self._database, self._store = database, store

    def table(
        self, asked: TableQuery, by: Grouping | None, metrics: Sequence[str], goal: Goal | None
    ) -> dict[str, Any]:
        """by: None for what one can group by only."""
        members, choices = self._members(asked, by)
        names = self._names(members)
        goals = goals_among(names)
        goal = goal or next(iter(goals), None)
        groups = self._groups(asked, by, members, metrics, goal) if by is not None else []
        bests = [group["best"] for group in groups if group["best"]]
        pick = max if goal and goal.higher else min
        return {
            "by": by and by.spelled, "choices": choices, "goal": goal and goal.spelled, "goals": [one.spelled for one in goals],
            "names": sorted(names), "groups": groups[:MOST_GROUPS], "more": max(0, len(groups) - MOST_GROUPS),
            "runs": len(members), "best": pick(bests, key=lambda one: one["value"], default=None),
        }  # fmt: skip

    def bands(
        self,
        asked: TableQuery,
        by: Grouping,
        goal: Goal | None,
        name: str,
        *,
        points: int,
        steps: tuple[int | None, int | None],
    ) -> dict[str, Any]:
        """One line a group, in the order of table()."""
        members, _ = self._members(asked, by)
        goal = goal or next(iter(goals_among(self._names(members))), None)
        groups = self._groups(asked, by, members, (), goal)[:MOST_DRAWN]
        most = max(2, min(_MOST_LINES, _MOST_READ // max(1, len(groups))))
        drawn = []
        for group in groups:
            its = [one.id for one in members if group["value"] in one.labels][:most]
            lines = [self._store.series(run, name, from_step=steps[0], to_step=steps[1], points=points) for run in its]
            drawn.append(
                {"value": group["value"], "of": group["runs"], "drawn": len(its), "band": band_of(lines, points)}
            )
        return {"name": name, "by": by.spelled, "groups": drawn}

    def settings(self, asked: TableQuery, by: Grouping | None, goal: Goal | None) -> dict[str, Any]:
        """The newest runs with what differs in their settings, and their results: the goal first."""
        members, choices = self._members(asked, by)
        goals = goals_among(self._names(members))
        goal = goal or next(iter(goals), None)
        shown = members[:MOST_ROWS]
        configs = self._configs(asked, [one.id for one in shown])
        results = [
            *([goal.name] if goal else []),
            *(one.name for one in goals if one.name != getattr(goal, "name", "")),
        ]
        values = {name: self._newest(asked, name) for name in results[:_MOST_RESULTS]}
        found = [{"name": name, "values": [_number(its.get(one.id)) for one in shown]} for name, its in values.items()]
        best = _best([(one, values[goal.name].get(one.id)) for one in shown], goal) if goal else None
        return {
            "by": by and by.spelled, "choices": choices, "goal": goal and goal.spelled, "goals": [one.spelled for one in goals],
            "total": len(members),
            "runs": [{"run": one.id, "name": one.name, "group": one.labels[0] if by else None} for one in shown],
            "settings": _differing([configs.get(one.id, {}) for one in shown]), "results": found, "best": best,
        }  # fmt: skip

    # ---- what they are made of

    def _members(self, asked: TableQuery, by: Grouping | None) -> tuple[list[_Member], list[str]]:
        """The newest runs that match, and by what one can group them. A configuration is read here and not by the database,
        as for sorting, and one at a time is kept."""
        columns = runs.c.name, runs.c.state, runs.c.group_name, runs.c.tags, runs.c.config, LEVEL.label("level")
        members: list[_Member] = []
        configs: list[dict[str, Any]] = []
        has_group = has_tag = False
        with self._database.read() as connection:
            query = _newest_first(matching(connection, asked, *columns))
            for row in connection.execute(query, execution_options={"yield_per": 50}):
                is_asked = len(members) < _ASKED_FOR_SETTINGS
                config = stored_object(row.config) if is_asked or (by and by.name) else {}
                if is_asked:
                    configs.append(_flat(config))
                has_group |= bool(row.group_name)
                has_tag |= row.tags not in ("", "[]")
                labels = by.labels(row, config) if by else []
                members.append(_Member(row.id, row.name or row.id, row.state, row.level, labels))
        settings = [f"config.{one['name']}" for one in _differing(configs)]
        choices = [*(["group"] if has_group else []), *(["tag"] if has_tag else []), *settings]
        return members, choices if by is None or by.spelled in choices else [by.spelled, *choices]

    def _configs(self, asked: TableQuery, ids: Sequence[str]) -> dict[str, dict[str, Any]]:
        with self._database.read() as connection:
            query = matching(connection, asked, runs.c.config).where(runs.c.id.in_(ids))
            rows = connection.execute(query, execution_options={"yield_per": 50})
            return {row.id: _flat(stored_object(row.config)) for row in rows}

    def _names(self, members: Sequence[_Member]) -> set[str]:
        """The series of the newest runs that are in a group."""
        asked = [one for one in members if one.labels != [None]] or members
        return {name for one in asked[:_ASKED_FOR_NAMES] for name in self._store.names(one.id)}

    def _newest(self, asked: TableQuery, name: str) -> dict[str, float]:
        with self._database.read() as connection:
            query = _newest_first(matching(connection, asked))
        return self._store.newest_of_runs(query, name)

    def _groups(
        self, asked: TableQuery, by: Grouping, members: Sequence[_Member], metrics: Sequence[str], goal: Goal | None
    ) -> list[dict[str, Any]]:
        """The best by the mean of the goal first, then those with the most runs; last the runs that are in none."""
        names = dict.fromkeys([*([goal.name] if goal else []), *metrics])
        values = {name: self._newest(asked, name) for name in names}
        its: dict[str | None, list[_Member]] = {}
        for member in members:
            for label in member.labels:
                its.setdefault(label, []).append(member)
        groups = [_group(by, label, one, values, goal) for label, one in its.items()]
        return sorted(groups, key=lambda group: _rank(group, goal))


def _newest_first(query: Select[Any]) -> Select[Any]:
    return query.order_by(runs.c.started.desc(), runs.c.id.desc()).limit(MOST_COMPARED)


def _group(
    by: Grouping,
    label: str | None,
    members: Sequence[_Member],
    values: Mapping[str, Mapping[str, float]],
    goal: Goal | None,
) -> dict[str, Any]:
    states: dict[str, int] = {}
    for one in members:
        states[one.state] = states.get(one.state, 0) + 1
    return {
        "value": label, "search": None if label is None else condition_text(by.spelled, label), "runs": len(members),
        "states": states, "severity": OUTCOMES[max(one.level for one in members)],
        "metrics": {name: _spread([its.get(one.id) for one in members]) for name, its in values.items()},
        "best": _best([(one, values[goal.name].get(one.id)) for one in members], goal) if goal else None,
    }  # fmt: skip


def _rank(group: Mapping[str, Any], goal: Goal | None) -> tuple[Any, ...]:
    mean = group["metrics"][goal.name]["mean"] if goal else None
    better = math.inf if mean is None else -mean if goal and goal.higher else mean
    return group["value"] is None, better, -group["runs"], str(group["value"])


def _spread(values: Iterable[float | None]) -> dict[str, Any]:
    """Of the finite ones: mean, sample standard deviation (of two and more), and how many they are."""
    known = [value for one in values if (value := _number(one)) is not None]
    mean = float(np.mean(known)) if known else None
    return {"mean": mean, "spread": float(np.std(known, ddof=1)) if len(known) > 1 else None, "n": len(known)}


def _best(values: Sequence[tuple[_Member, float | None]], goal: Goal) -> dict[str, Any] | None:
    """The first of equals: the newest run."""
    known = [(one, value) for one, found in values if (value := _number(found)) is not None]
    if not known:
        return None
    one, value = (max if goal.higher else min)(known, key=lambda pair: pair[1])
    return {"run": one.id, "name": one.name, "value": value}


def _number(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _label(value: Any) -> str | None:
    """1 and 1.0 are one group."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool):
        return str(value).lower()
    is_whole = isinstance(value, float) and value.is_integer() and abs(value) < _EXACT
    return str(int(value)) if is_whole else repr(value)


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that are one word or number, the user's own first."""
    tables = divided(config, {})
    flat = {name: value for of in ("yours", "found") for name, value in flattened(tables[of])}
    return {name: value for name, value in flat.items() if isinstance(value, (str, int, float, bool))}


def _differing(configs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Those of which runs have two values and more; what means nothing comes last."""
    names = dict.fromkeys(name for one in configs for name in one)
    found = [{"name": name, "values": [one.get(name) for one in configs]} for name in names]
    found = [one for one in found if len({_label(value) for value in one["values"]}) > 1]
    found.sort(key=lambda one: str(one["name"]).rsplit(".", 1)[-1].lower() in _SEEDS)
    return found[:_MOST_SETTINGS]


def band_of(lines: Sequence[Series], points: int) -> Band:
    """Of the finite values; at most `points` steps."""
    known = []
    for line in lines:
        step, mean = np.asarray(line.step, np.int64), np.asarray(line.mean, np.float64)
        is_finite = np.isfinite(mean)
        if is_finite.any():
            known.append((step[is_finite], mean[is_finite]))
    if not known:
        return Band([], [], [], [], [])
    steps = np.unique(np.concatenate([step for step, _ in known]))
    if len(steps) > points:
        steps = np.unique(np.linspace(steps[0], steps[-1], points).round().astype(np.int64))
    values = np.stack([np.interp(steps, step, mean, left=np.nan, right=np.nan) for step, mean in known])
    count = np.isfinite(values).sum(axis=0)
    steps, values, count = steps[count > 0], values[:, count > 0], count[count > 0]
    mean, low, high = (one(values, axis=0).tolist() for one in (np.nanmean, np.nanmin, np.nanmax))
    return Band(steps.tolist(), mean, low, high, count.tolist())
