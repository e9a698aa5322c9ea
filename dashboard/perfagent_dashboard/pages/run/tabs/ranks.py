"""Ranks: which is slow or silent, and where their threads stand."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dash import html

from perfagent_client.units import duration
from perfagent_dashboard.components.board import board
from perfagent_dashboard.components.feedback import nothing
from perfagent_dashboard.components.marks import state_badge
from perfagent_dashboard.components.numbers import number
from perfagent_dashboard.components.tables import table
from perfagent_dashboard.pages.run.commands import ask_button
from perfagent_dashboard.pages.run.facts import RunFacts, run_path
from perfagent_dashboard.server_api import ServerApi
from perfagent_dashboard.words import say

if TYPE_CHECKING:
    from dash.development.base_component import Component

__all__ = ["content", "count", "is_there"]

_MOST = 512
_NEWEST = 100
"""Steps over which a rank's time is compared with the others'."""


def is_there(facts: RunFacts) -> bool:
    return facts.ranks > 1 or bool(facts.verdict["rule"] == "hang")


def count(facts: RunFacts) -> str:
    return str(facts.ranks)


async def content(server: ServerApi, facts: RunFacts) -> list[Component]:
    newest = {"from": max(0, facts.run["step"] - _NEWEST + 1)}
    times, states, stacks = await asyncio.gather(
        server.get(run_path(facts.id, "ranks"), name="step_time_s", points=1, **newest),
        server.get(run_path(facts.id, "events"), kind="state", limit=1000),
        server.get(run_path(facts.id, "stacks")),
    )
    return [
        board(facts.id, names=["ranks:step_time_s"]),
        html.Section([html.H2(say("ranks_title")), _table(times, states["events"])], className="part"),
        *_stacks(facts, stacks),
    ]


def _table(times: Mapping[str, Any], states: Sequence[Mapping[str, Any]]) -> Component:
    """A row a rank, the slowest first."""
    told: dict[int, dict[str, Any]] = {}
    for event in states:  # oldest first: what is said last counts
        told.setdefault(event["rank"], {}).update(
            {key: value for key, value in event["data"].items() if value not in (None, "")}
        )
    seconds = {rank: number(row[0]) if row else None for rank, row in zip(times["ranks"], times["mean"], strict=True)}
    known = sorted(value for value in seconds.values() if value is not None)
    middle = known[len(known) // 2] if known else 0.0
    ranks = sorted({*told, *seconds}, key=lambda rank: (-(seconds.get(rank) or 0.0), rank))
    rows = [_row(rank, seconds.get(rank), middle, told.get(rank, {})) for rank in ranks[:_MOST]]
    heads = [say("rank"), say("column_state"), say("kpi_step_time"), say("over_median"), say("host_word"), "pid"]
    return table(heads, rows, empty=say("ranks_none"))


def _row(rank: int, seconds: float | None, middle: float, told: Mapping[str, Any]) -> list[Any]:
    share = seconds / middle if seconds is not None and middle else None
    slow = share is not None and share > 1.1
    return [
        str(rank),
        state_badge(str(told["state"])) if "state" in told else "",
        duration(seconds) if seconds is not None else say("na"),
        html.Span(f"{share:.2f} ×" if share is not None else "", className="bad" if slow else ""),
        str(told.get("host", "")),
        str(told.get("pid", "")),
    ]


def _stacks(facts: RunFacts, stacks: Mapping[str, Any]) -> list[Component]:
    """Where the training threads stood when they were last asked; the smallest group first."""
    ask = ask_button(facts, "stacks", "ranks")
    groups = [_group(group, is_open=place == 0) for place, group in enumerate(stacks["groups"])]
    if not groups and ask is None:
        return []
    shown = groups or [nothing(say("stacks_none"))]
    return [html.Section([html.H2(say("stacks_title")), ask, *shown], className="part")]


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
