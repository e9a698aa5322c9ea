"""Time: where the time of a step goes, with its spread; lines that made the host wait; profiles."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from dash import html

from perfagent.wire import Latest, Timing
from perfagent.wire.quantities import duration
from perfagent_client.models import parse
from perfagent_client.timing_table import timing_rows
from perfagent_dashboard.components.attributes import hyphenated
from perfagent_dashboard.components.board import board
from perfagent_dashboard.components.feedback import nothing
from perfagent_dashboard.components.parts import part
from perfagent_dashboard.components.prose import prose
from perfagent_dashboard.components.tables import table
from perfagent_dashboard.components.times import ago
from perfagent_dashboard.figures.charts import CHARTS
from perfagent_dashboard.pages.run.commands import ask_button
from perfagent_dashboard.pages.run.facts import RunFacts, run_path
from perfagent_dashboard.pages.run.tiles import window_of
from perfagent_dashboard.server_api import ServerApi
from perfagent_dashboard.words import say, title_of

if TYPE_CHECKING:
    from dash.development.base_component import Component

__all__ = ["content", "is_there"]

_SPEED = {chart.name for chart in CHARTS if chart.group == "speed"}
_OPERATORS = 10
_MOST_PROFILES = 5


def is_there(facts: RunFacts) -> bool:
    return bool(facts.timing["series"] or facts.profiles or _SPEED.intersection(facts.names))


async def content(server: ServerApi, facts: RunFacts) -> list[Component]:
    sync, lines, profiles = await asyncio.gather(
        server.get(run_path(facts.id, "events"), kind="sync", limit=1),
        server.get(run_path(facts.id, "events"), kind="lines", limit=1),
        _profiles(server, facts),
    )
    return [
        _spread(facts),
        board(facts.id, sections=["speed"]),
        *_lines(sync["events"], "sync_lines", "times_a_step"),
        *_lines(lines["events"], "lines_outside", "looks"),
        *profiles,
    ]


def _spread(facts: RunFacts) -> Component:
    """Median, mean and percentiles of the whole step and of each phase."""
    timing = parse(Timing, dict(facts.timing))
    latest = {name: parse(Latest, dict(one)) for name, one in facts.latest.items()}
    heads = [*(say(f"column_{one}") for one in ("part", "share", "median", "mean")), "p90", "p99", say("column_newest")]
    rows = [(_part_of_step(name), *row) for name, *row in timing_rows(timing, latest)]
    ranks, bucket = facts.ranks, timing.window.bucket_steps if timing.window else 1
    notes = [say("spread_ranks", count=ranks)] if ranks > 1 else []
    notes += [say("spread_buckets", count=bucket)] if bucket > 1 else []
    over = say("where_over", over=window_of(facts.timing))
    return part(over, table(heads, rows, empty=say("where_empty")), *(html.P(one, className="quiet") for one in notes))


def _part_of_step(series: str) -> str:
    title = title_of(series)
    return say("whole_step") if series == "step_time_s" else series[6:-2] if title == series else title


def _lines(events: Sequence[Mapping[str, Any]], title: str, counted: str) -> list[Component]:
    """Lines of the script from the newest event of a kind."""
    told = events[-1]["data"].get("lines") if events else None
    if not isinstance(told, list) or not told:
        return []
    rows = [
        [html.Code(str(one.get("line"))), str(one.get("in") or ""), f"{one.get('count', 0):,}"]
        for one in told
        if isinstance(one, Mapping)
    ]
    shown = table([say("line"), say("function"), say(counted)], rows, empty="")
    return [part(say(title), html.P(say(f"{title}_hint"), className="quiet"), shown)]


async def _profiles(server: ServerApi, facts: RunFacts) -> list[Component]:
    ask = ask_button(facts, "profile", "time")
    if not facts.profiles and ask is None:
        return []
    cards = [_profile(one, one) for one in facts.profiles[:_MOST_PROFILES]]
    if cards:
        newest = facts.profiles[0]
        full = await server.get(run_path(facts.id, "profiles", quote(newest["id"], safe=""), "operators"))
        cards[0] = _profile(newest, full, is_open=True)
    if (left := len(facts.profiles) - len(cards)) > 0:
        cards.append(nothing(say("and_more", count=left)))
    return [part(say("profiles"), ask, *(cards or [nothing(say("profiles_none"))]))]


def _profile(listed: Mapping[str, Any], full: Mapping[str, Any], *, is_open: bool = False) -> Component:
    """listed: with its five largest operators; full: with all of them."""
    steps = listed["first_step"]
    head: list[Any] = [f"{say('steps')} {steps:,}–{listed['last_step']:,}, "] if steps is not None else []
    head.append(f"{say('rank')} {listed['rank']}, ")
    named = "".join(head).strip(", ")
    head.append(ago(listed["time"]))
    head += [f", {say('taken_for', why=listed['rule'] or listed['who'])}"] if listed["rule"] or listed["who"] else []
    trace = [
        html.Div(className="flame", **hyphenated(data_url=listed["url"], data_name=named)),
        html.P([html.A(say("trace"), href=listed["url"], download=""), " ", say("trace_hint")]),
    ]
    return html.Details(
        [
            html.Summary(head),
            html.P(str(full["cut_short"]), className="quiet") if full.get("cut_short") else None,
            html.Ul([html.Li(prose(str(one))) for one in full["says"]]) if full["says"] else None,
            _operators(full["operators"]),
            *(trace if listed["trace"] == "complete" else [html.P(listed["note"], className="quiet")]),
        ],
        open=is_open,
        className="card profile",
    )


def _operators(told: Sequence[Mapping[str, Any]]) -> Component:
    """Those with the most time of their own: on the device, where one was used."""
    on_device = any(one.get("self_device_s") for one in told)
    column = "self_device_s" if on_device else "self_cpu_s"
    largest = sorted(told, key=lambda one: -float(one.get(column) or 0.0))[:_OPERATORS]
    rows = [
        [html.Code(str(one.get("name"))), f"{one.get('calls', 0):,}", duration(float(one.get(column) or 0.0))]
        for one in largest
    ]
    heads = [say("operator"), say("calls"), say("self_device" if on_device else "self_cpu")]
    return table(heads, rows, empty=say("operators_none"))
