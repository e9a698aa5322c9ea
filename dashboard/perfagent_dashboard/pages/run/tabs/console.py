"""Console: what the script wrote, the newest at the end, with search, rank and stream."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import dash_mantine_components as dmc
from dash import dcc, html

from perfagent_dashboard.components.feedback import nothing
from perfagent_dashboard.components.fields import choice, search_field
from perfagent_dashboard.components.parts import part
from perfagent_dashboard.components.times import at_clock
from perfagent_dashboard.components.traceback import traceback_text
from perfagent_dashboard.pages.run.facts import RunFacts, run_path
from perfagent_dashboard.server_api import ServerApi
from perfagent_dashboard.words import say

if TYPE_CHECKING:
    from dash.development.base_component import Component

__all__ = ["console_text", "content", "refreshed"]

_EVENTS = 400
_LINES = 2000


async def content(server: ServerApi, facts: RunFacts) -> list[Component]:
    events = await _events(server, facts.id, "log", _EVENTS)
    lines = _lines_of(events, "", "", "", several=facts.ranks > 1)
    return [
        *_ending(facts, await _exception(server, facts.id)),
        html.Div(_tools(sorted({event["rank"] for event in events})), className="tab-tools"),
        html.Div(lines, id="console-lines", className="console-lines", tabIndex="0"),
    ]


def _tools(ranks: Sequence[int]) -> list[Component]:
    """ranks: that have written something."""
    streams = [{"value": one, "label": say(f"stream_{one or 'all'}")} for one in ("", "stdout", "stderr")]
    named = [("", say("all_ranks")), *((str(rank), f"{say('rank')} {rank}") for rank in ranks)]
    return [
        search_field("console-search", say("console_search")),
        html.Div(choice("console-rank", say("rank"), named), hidden=len(ranks) < 2),
        dmc.SegmentedControl(id="console-stream", data=streams, value="", size="sm"),
        dcc.Clipboard(target_id="console-lines", title=say("copy"), className="button small"),
        html.Button(say("download"), id="console-download", type="button", className="button"),
        dcc.Download(id="console-file"),
    ]


async def _events(
    server: ServerApi, run: str, kind: str, limit: int, before: int | None = None
) -> list[dict[str, Any]]:
    told = await server.get(run_path(run, "events"), kind=kind, limit=limit, before=before)
    found: list[dict[str, Any]] = told["events"]
    return found


async def console_text(server: ServerApi, run: str) -> str:
    """Every line that the server still has, for a file."""
    events = older = await _events(server, run, "log", 1000)
    while older:
        older = await _events(server, run, "log", 1000, events[0]["id"])
        events = older + events
    lines = [line for event in events for line in event["data"].get("lines") or []]
    return "\n".join(map(str, lines)) + "\n"


async def refreshed(
    server: ServerApi, run: str, search: str, rank: str, stream: str, *, several: bool
) -> list[Component]:
    events = await _events(server, run, "log", _EVENTS)
    return _lines_of(events, search, rank, stream, several=several)


def _lines_of(
    events: Sequence[Mapping[str, Any]], search: str, rank: str, stream: str, *, several: bool
) -> list[Component]:
    """The newest lines that fit. search: words, or `/regex/`; a bad expression matches nothing and is said."""
    try:
        fits = _matcher(search)
    except re.error as error:
        return [nothing(say("bad_regex", why=str(error)))]
    rows: list[Component] = []
    left = _LINES
    for event in reversed(events):
        data = event["data"]
        if (rank and str(event["rank"]) != rank) or (stream and data.get("stream") != stream):
            continue
        lines = [str(line) for line in data.get("lines") or [] if fits(str(line))][-left:]
        if lines:
            rows.append(_block(event, lines, several=several))
            left -= len(lines)
        if left <= 0:
            break
    return rows[::-1] or [nothing(say("console_none" if not (search or rank or stream) else "nothing_found"))]


def _matcher(search: str) -> Any:
    text = search.strip()
    if len(text) > 2 and text.startswith("/") and text.endswith("/"):
        pattern = re.compile(text[1:-1], re.IGNORECASE)
        return lambda line: pattern.search(line[:2000]) is not None
    words = text.lower().split()
    return lambda line: all(word in line.lower() for word in words)


def _block(event: Mapping[str, Any], lines: Sequence[str], *, several: bool) -> Component:
    front = html.Span([at_clock(event["time"]), f" [{event['rank']}]" if several else ""], className="at")
    is_error = event["data"].get("stream") == "stderr"
    return html.Div([front, html.Pre("\n".join(lines))], className="block err" if is_error else "block")


async def _exception(server: ServerApi, run: str) -> str:
    """The traceback of the process that ended last with one."""
    for event in reversed(await _events(server, run, "state", 200)):
        told = event["data"].get("traceback")
        text = "".join(told) if isinstance(told, list) else told
        if isinstance(text, str) and text:
            return text
    return ""


def _ending(facts: RunFacts, trace: str) -> list[Component]:
    if not trace:
        return []
    head = [say("ending"), f": {facts.run['reason']}" if facts.run["reason"] else ""]
    return [part(head, traceback_text(trace.splitlines()))]
