"""A screen of the table of runs in one answer: filtered, sorted, counted, each run with its verdict and newest figures.

What is costly of a run (verdict, newest values, throughput, trend) is made for the rows of the page only, and kept until
the run sends more, or an alert of it changes.
"""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sqlalchemy import func, select

from perfagent.wire import OUTCOMES, Finding, Timing, outcome_of, plain
from perfagent.wire.loss_names import loss_of
from perfagent_server.database import Database
from perfagent_server.rules.texts.alike import alike
from perfagent_server.rules.texts.reader import reader
from perfagent_server.runs.conditions import conditions_in
from perfagent_server.runs.figures import Figures
from perfagent_server.runs.run_filters import (
    COLUMNS,
    TableQuery,
    counted,
    matching,
    open_alerts,
    rows_of,
)
from perfagent_server.runs.run_queries import Runs
from perfagent_server.store.interface import MetricStore
from perfagent_server.store.stored_json import stored_names, stored_object
from perfagent_server.store.tables import run as runs

__all__ = ["MOST_COMPARED", "RunTable", "setting_of"]

_ALWAYS = (
    "tokens_per_s",
    "samples_per_s",
    "gpu/utilization_pct",
    "gpu/memory_used_bytes",
    "host/cpu_pct",
    "process/rss_bytes",
)
_TREND_POINTS = 40
_KEPT = 5000
_FRESH_S = 3.0  # of a run that goes on
MOST_COMPARED = 10_000
"""The newest runs, by their settings and values."""


@dataclass(slots=True)
class _Kept:
    """key: what it was made of, its last part when an alert of the run changed; made: when, by the monotonic clock."""

    key: tuple[Any, ...]
    made: float
    parts: dict[str, Any] = field(default_factory=dict)


class RunTable:
    """verdict_of: of a run, as people read it."""

    def __init__(
        self,
        database: Database,
        store: MetricStore,
        runs_of: Runs,
        figures: Figures,
        verdict_of: Callable[[str], Finding],
    ) -> None:
        self._database, self._store, self._runs = database, store, runs_of
        self._figures, self._verdict_of = figures, verdict_of
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._lock = threading.Lock()

    def narrowed(self, asked: TableQuery) -> TableQuery:
        """The query with the runs that its comparisons (`val/acc > 0.6`, `config.lr = 1e-3`) leave, instead of those."""
        conditions, text = ([], asked.text) if asked.is_pattern else conditions_in(asked.text)
        if not conditions:
            return asked
        asked = replace(asked, text=text)
        every = replace(asked, states=(), severities=(), attention=False)  # what those offer is counted, too
        with self._database.read() as connection:
            newest = matching(connection, every).order_by(runs.c.started.desc(), runs.c.id.desc())
            query = newest.limit(MOST_COMPARED)
            ids = list(connection.execute(query).scalars())
        for condition in conditions:
            values: Mapping[str, Any]
            if condition.is_setting:
                values = self._settings(ids, condition.name)
            elif condition.name in ("group", "tag"):
                values = self._names_of(ids, condition.name)
            else:
                values = self._store.newest_of_runs(query, condition.name)
            ids = [run for run in ids if condition.holds(values.get(run))]
        return replace(asked, only=ids)

    def _settings(self, ids: Sequence[str], name: str) -> dict[str, Any]:
        """Read here, as for sorting."""
        with self._database.read() as connection:
            query = select(runs.c.id, runs.c.config).where(runs.c.id.in_(ids))
            found = connection.execute(query, execution_options={"yield_per": 50})
            return {row.id: setting_of(stored_object(row.config), name) for row in found}

    def _names_of(self, ids: Sequence[str], kind: str) -> dict[str, list[str]]:
        """Groups or tags of these runs."""
        column = runs.c.group_name if kind == "group" else runs.c.tags
        with self._database.read() as connection:
            found = connection.execute(select(runs.c.id, column).where(runs.c.id.in_(ids)))
            return {run: stored_names(value) if kind == "tag" else [value or ""] for run, value in found}

    def screen(self, asked: TableQuery) -> dict[str, Any]:
        """{"runs": [...], "next": offset or None, "total", "counts"}."""
        sorted_ids = None if asked.sort in COLUMNS else self._sorted(asked)
        ids = None if sorted_ids is None else sorted_ids[asked.offset : asked.offset + asked.limit]
        with self._database.read() as connection:
            total = connection.execute(
                select(func.count()).select_from(matching(connection, asked).subquery())
            ).scalar_one()
            counts = counted(connection, asked)
            found = rows_of(connection, asked, ids)
            alerts = open_alerts(connection, [row.id for row in found])
        page = [row.id for row in found]
        rows = self._runs.rows(page)
        if "config" in asked.parts:
            whole = {one.run: plain(one) for one in self._runs.summaries(page)}
            rows = {run: {**row, **whole.get(run, {})} for run, row in rows.items()}
        shown = [self._row(row, rows[row.id], alerts.get(row.id, {}), asked) for row in found if row.id in rows]
        following = asked.offset + len(found)
        return {"runs": shown, "next": following if following < total else None, "total": total, "counts": counts}

    def _row(
        self, row: Any, summary: Mapping[str, Any], alerts: Mapping[str, Any], asked: TableQuery
    ) -> dict[str, Any]:
        parts = self._parts(row, asked.parts, asked.columns)
        shown = {
            "run": row.id,
            **summary,
            "severity": OUTCOMES[row.level],
            "needs_attention": bool(row.attention),
            "alerts": alerts,
        }
        if "latest" in asked.parts:
            shown["loss"] = loss_of(parts["all"])
        shown |= {name: parts[name] for name in asked.parts if name in parts}
        wanted = [name.removeprefix("config:") for name in asked.columns if name.startswith("config:")]
        if wanted:
            config = stored_object(row.config)
            shown["config"] = {name: setting_of(config, name) for name in wanted}
        return shown

    def _sorted(self, asked: TableQuery) -> list[str]:
        """The ids of all that match, by a metric's newest value or by a setting; runs without one come last, and among
        equals the newest first. Only that value is kept of a run, and none of its configuration.

        A setting is read here and not by the database: a configuration is text that a script wrote, and NaN, half a
        surrogate pair or a broken row in one of them would end the statement of PostgreSQL, and the answer, for all runs;
        SQLite finds no key that json.dumps has escaped."""
        is_setting = asked.sort.startswith("config:")
        with self._database.read() as connection:
            query = matching(connection, asked)
            newest_first = query.order_by(runs.c.started.desc(), runs.c.id.desc())
            if is_setting:
                rows = connection.execute(newest_first.add_columns(runs.c.config), execution_options={"yield_per": 50})
                name = asked.sort.removeprefix("config:")
                keyed = [(row.id, _sortable(setting_of(stored_object(row.config), name))) for row in rows]
            else:
                keyed = [(run, None) for run in connection.execute(newest_first).scalars()]
        if not is_setting:
            values = self._store.newest_of_runs(query, asked.sort)
            keyed = [(run, _sortable(values.get(run))) for run, _ in keyed]
        known = [(run, key) for run, key in keyed if key is not None]
        known.sort(key=lambda one: one[1], reverse=bool(asked.descending))
        return [run for run, _ in known] + [run for run, key in keyed if key is None]

    def _parts(self, row: Any, wanted: Sequence[str], columns: Sequence[str]) -> dict[str, Any]:
        """The costly parts of a run, made where they are not kept."""
        made = self._kept_of(row)
        its_verdict = f"verdict {reader.get()}"
        if "verdict" in wanted and its_verdict not in made:
            made[its_verdict] = _brief(self._verdict_of(row.id), row.state)
        if {"latest", "trend"} & {*wanted} and "all" not in made:
            made["all"] = {name: one.value for name, one in self._store.latest(row.id).items()}
        if "timing" in wanted and "timing" not in made:
            made["timing"] = _timing(self._figures.of(row.id))
        if "trend" in wanted and "trend" not in made:
            made["trend"] = self._trend(row.id, loss_of(made["all"]))
        parts = {**made, "verdict": made.get(its_verdict)}
        return parts if "latest" not in wanted else {**parts, "latest": _wanted(made["all"], columns)}

    def _kept_of(self, row: Any) -> dict[str, Any]:
        """What is kept of a run: until an alert of it changes; of a run that goes on, for a moment."""
        key = (row.updated, row.state, row.attempts, row.changed)
        with self._lock:
            kept = self._kept.get(row.id)
            is_old = kept is None or row.ended is not None or time.monotonic() - kept.made > _FRESH_S
            if kept is None or kept.key[-1] != key[-1] or (kept.key != key and is_old):
                kept = self._kept[row.id] = _Kept(key, time.monotonic())
            self._kept.move_to_end(row.id)
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
            return kept.parts

    def _trend(self, run: str, name: str | None) -> list[float | None]:
        if name is None:
            return []
        found = self._store.series(run, name, points=_TREND_POINTS)
        return [value if math.isfinite(value) else None for value in found.mean]


def _brief(found: Finding, state: str) -> dict[str, Any]:
    names = (
        "rule",
        "severity",
        "title",
        "message",
        "since_step",
        "since",
        "cost",
        "money_per_hour",
        "currency",
        "gain_pct",
    )
    judged = found.rule != "healthy" or bool(found.evidence.get("step"))
    return {
        **{name: getattr(found, name) for name in names}, "outcome": outcome_of(found, state), "judged": judged,
        "alike": alike(found.title or found.message),
    }  # fmt: skip


def _wanted(values: Mapping[str, float], columns: Sequence[str]) -> dict[str, float]:
    loss = loss_of(values)
    names = [*([loss] if loss else []), *_ALWAYS, *(one for one in columns if not one.startswith("config:"))]
    return {name: values[name] for name in names if name in values}


def _timing(timing: Timing) -> dict[str, Any]:
    rate = next((name for name in ("tokens_per_s", "samples_per_s") if name in timing.rates), None)
    took = timing.series.get("step_time_s")
    return {
        "step_time_s": None if took is None else took.p50,
        "throughput": None if rate is None else timing.rates[rate].p50,
        "throughput_name": rate,
        "rates": {name: one.p50 for name, one in timing.rates.items()},
        "window": timing.window,
    }


def setting_of(config: Any, name: str) -> Any:
    """`optimizer.lr` of {"optimizer": {"lr": ...}}."""
    for part in name.split("."):
        if not isinstance(config, Mapping) or part not in config:
            return None
        config = config[part]
    return config if isinstance(config, (str, int, float, bool)) else None


def _sortable(value: Any) -> tuple[int, Any] | None:
    if isinstance(value, bool) or value is None:
        return None if value is None else (0, float(value))
    if isinstance(value, (int, float)):
        return None if math.isnan(value) else (0, float(value))
    return (1, str(value))
