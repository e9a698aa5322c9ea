"""Ranks: which is slow or silent, and where their threads stand."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from dash import html

from perfagent.wire.quantities import duration
from perfagent_dashboard.components.feedback import nothing
from perfagent_dashboard.components.marks import state_badge
from perfagent_dashboard.components.numbers import number
from perfagent_dashboard.components.parts import graph, part
from perfagent_dashboard.components.rank_bars import own_work_of
from perfagent_dashboard.components.tables import table
from perfagent_dashboard.figures.ranks import rank_figure
from perfagent_dashboard.pages.run.commands import ask_button
from perfagent_dashboard.pages.run.facts import RunFacts, run_path
from perfagent_dashboard.server_api import ServerApi
from perfagent_dashboard.words import say, title_of

if TYPE_CHECKING:
    from dash.development.base_component import Component

__all__ = ["RULES", "content", "count", "is_there", "title"]

_MOST = 512
_NEWEST = 100
"""Steps over which a rank's work is compared with the others', where no finding has done so."""
_COLUMNS = 120
_SLOW = 1.1

RULES = ("straggler", "load_imbalance", "stage_imbalance", "hang", "rank_absent")
"""Their findings are about ranks, and what those do is seen here."""


def is_there(facts: RunFacts) -> bool:
    return facts.ranks > 1 or facts.has_stacks


def title(facts: RunFacts) -> str:
    return say("tab_ranks" if facts.ranks > 1 else "tab_stacks")


def count(facts: RunFacts) -> str:
    return str(facts.ranks) if facts.ranks > 1 else ""


async def content(server: ServerApi, facts: RunFacts) -> list[Component]:
    stacks = await server.get(run_path(facts.id, "stacks"))
    if facts.ranks == 1:
        return _stacks(facts, stacks)
    newest = {"from": max(0, facts.run["step"] - _NEWEST + 1), "points": 1}
    own, took, states, matrix = await asyncio.gather(
        server.get(run_path(facts.id, "ranks"), name="own_work_s", **newest),
        server.get(run_path(facts.id, "ranks"), name="step_time_s", **newest),
        server.get(run_path(facts.id, "events"), kind="state", limit=1000),
        server.get(run_path(facts.id, "ranks"), name="own_work_s", points=_COLUMNS),
    )
    work = _by_rank(own) | own_work_of([facts.verdict, *facts.findings])
    ranks = _table(work, _by_rank(took), states["events"])
    return [part(say("ranks_title"), ranks), *_map(matrix), *_stacks(facts, stacks)]


def _map(matrix: Mapping[str, Any]) -> list[Component]:
    """Of the whole run; nothing where no rank tells its work."""
    if not matrix["step"]:
        return []
    figure = rank_figure(matrix, say("rank_told", rank="%{y}", share="%{z:.2f}"))
    unit = html.P(say("rank_map_unit"), className="quiet")
    return [part(say("rank_map"), unit, graph(figure, min(600, 160 + 10 * len(matrix["ranks"]))))]


def _by_rank(matrix: Mapping[str, Any]) -> dict[int, float]:
    """Of a matrix with one bucket."""
    known = {rank: number(row[0]) if row else None for rank, row in zip(matrix["ranks"], matrix["mean"], strict=True)}
    return {rank: value for rank, value in known.items() if value is not None and math.isfinite(value)}


def _table(work: Mapping[int, float], took: Mapping[int, float], states: Sequence[Mapping[str, Any]]) -> Component:
    """A row a rank, that with the most own work first."""
    told: dict[int, dict[str, Any]] = {}
    for event in states:  # oldest first: what is said last counts
        told.setdefault(event["rank"], {}).update(
            {key: value for key, value in event["data"].items() if value not in (None, "")}
        )
    middle = median(work.values()) if work else 0.0
    ranks = sorted({*told, *work, *took}, key=lambda rank: (-work.get(rank, 0.0), rank))
    rows = [_row(rank, work.get(rank), took.get(rank), middle, told.get(rank, {})) for rank in ranks[:_MOST]]
    if (left := len(ranks) - len(rows)) > 0:
        rows.append([say("and_more", count=left), *[""] * 6])
    heads = [say("rank").title(), say("column_state"), say("own_work"), say("over_median"), title_of("step_time_s")]
    return table([*heads, say("host_word"), "PID"], rows, empty=say("ranks_none"))


def _row(rank: int, own: float | None, took: float | None, middle: float, told: Mapping[str, Any]) -> list[Any]:
    share = own / middle if own is not None and middle else None
    return [
        str(rank),
        state_badge(str(told["state"])) if "state" in told else "",
        duration(own) if own is not None else say("na"),
        html.Span(f"{share:.2f} ×" if share is not None else "", className="bad" if share and share > _SLOW else ""),
        duration(took) if took is not None else say("na"),
        str(told.get("host", "")),
        str(told.get("pid", "")),
    ]


def _stacks(facts: RunFacts, stacks: Mapping[str, Any]) -> list[Component]:
    """Where the training threads stood when they were last asked; the smallest group first."""
    ask = ask_button(facts, "stacks", "ranks")
    groups = [_group(group, is_open=place == 0) for place, group in enumerate(stacks["groups"])]
    if not groups and ask is None:
        return []
    return [part(say("stacks_title"), ask, *(groups or [nothing(say("stacks_none"))]))]


def _group(group: Mapping[str, Any], *, is_open: bool) -> Component:
    frames = group["frames"]
    where = html.Code(frames[-1] if frames else "")
    return html.Details(
        [
            html.Summary([html.B(f"{say('rank')} {_named(group['ranks'])}"), " ", where]),
            html.Pre("\n".join(frames), className="console", tabIndex="0"),
        ],
        className="card stack",
        open=is_open,
    )


def _named(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:16])) + (f" … ({len(ranks)})" if len(ranks) > 16 else "")
