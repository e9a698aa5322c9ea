"""The line that stays at the top of a run's page: where it belongs, how it is, and what can be done with it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import dash_mantine_components as dmc
from dash import html

from perfagent.wire import Spent
from perfagent_client.models import RunDetails, parse
from perfagent_client.spent import UNITS, amounts, money, paused_s
from perfagent_dashboard.components.attributes import OPENS, hyphenated
from perfagent_dashboard.components.icons import icon
from perfagent_dashboard.components.marks import state_badge
from perfagent_dashboard.components.times import ago, moment, since_then
from perfagent_dashboard.pages.run.facts import RunFacts
from perfagent_dashboard.words import say

if TYPE_CHECKING:
    from dash.development.base_component import Component

__all__ = ["head"]

_MOST_TAGS = 8
_FORMATS = ("csv", "jsonl", "parquet")


def head(facts: RunFacts) -> list[Component]:
    run = facts.run
    project = f"/runs?project={quote(run['project'], safe='')}"
    return [
        html.Div(
            [
                html.Span(
                    [
                        html.A(say("nav_runs"), href="/runs", **hyphenated(data_nav="/runs")), " / ",
                        html.A(run["project"], href=project, **hyphenated(data_nav=project)), " /",
                    ],
                    className="path",
                ),
                html.H1(run["name"] or run["run"], title=run["run"]),
                state_badge(run["state"]),
            ],
            className="named",
        ),
        html.Div(_facts(facts), className="facts"),
        html.Div(_tools(facts), className="head-tools"),
    ]  # fmt: skip


def _facts(facts: RunFacts) -> list[Component]:
    run = facts.run
    parts: list[Any] = [html.Span([f"{say('step')} ", html.B(f"{run['step']:,}")])]
    parts += [html.Span([say("started_word"), " ", moment(run["started"])])] if run["started"] else []
    if run["state"] == "lost":
        parts.append(html.Span([say("last_heard_word"), " ", ago(run["updated"])]))
    elif run["started"]:
        words = say("took_word" if run["ended"] else "starting_word" if run["state"] == "starting" else "running_word")
        parts.append(
            html.Span([words, " ", since_then(run["started"], run["ended"], paused_s(parse(RunDetails, run)))])
        )
    parts += [html.Span(say("ranks", count=facts.ranks))] if facts.ranks > 1 else []
    parts += [html.Span(say("attempts", count=run["attempts"]))] if run["attempts"] > 1 else []
    parts += [html.Span(run["host"], title=say("host"))] if run["host"] else []
    spent = parse(Spent, run["spent"])
    cost = money(spent, say("spent_an_hour"))
    taken = [*([cost] if cost else []), *amounts(spent, {name: say(f"spent_{name}") for name in UNITS})]
    parts += [html.Span(taken[0], title=", ".join(taken))] if taken else []
    parts += [html.Span(tag, className="tag") for tag in run["tags"][:_MOST_TAGS]]
    parts += [html.Span(f"+{len(run['tags']) - _MOST_TAGS}", className="tag")] if len(run["tags"]) > _MOST_TAGS else []
    for what, told in run.get("left_out", {}).items():
        key = f"{what}_left_out" if told.get("exact") else f"{what}_left_out_or_more"
        parts.append(html.Span(say(key, count=told["count"], limit=told["limit"]), className="left-out"))
    return parts


def _tools(facts: RunFacts) -> list[Component]:
    return [
        html.Button(
            [icon("link"), html.Span(say("share"))], type="button", className="button", **hyphenated(data_copy="address")
        ),
        dmc.Menu(
            [
                dmc.MenuTarget([icon("download"), html.Span(say("export"))], boxWrapperProps=OPENS),
                dmc.MenuDropdown(_exports(facts)),
            ],
            position="bottom-end",
        ),
        dmc.Menu(
            [
                dmc.MenuTarget("⋯", boxWrapperProps=OPENS | {"aria-label": say("run_menu")}),
                dmc.MenuDropdown(_acts(facts)),
            ],
            position="bottom-end",
        ),
    ]  # fmt: skip


def _exports(facts: RunFacts) -> list[Component]:
    ident = quote(facts.id, safe="")
    files = [
        dmc.MenuItem(say(f"export_{name}"), href=f"/api/v1/runs/{ident}/export?format={name}", target="_blank")
        for name in _FORMATS
    ]
    return [dmc.MenuItem(say("report"), href=f"/report/{ident}", target="_blank"), dmc.MenuDivider(), *files]


def _acts(facts: RunFacts) -> list[Component]:
    """Those that the viewer may do; comparing anybody may."""
    ident = quote(facts.id, safe="")
    may_change = "operate" in facts.may
    return [
        dmc.MenuItem(say("compare_with"), href=f"/compare?runs={ident}"),
        dmc.MenuItem(say("edit_run"), id="run-edit", disabled=not may_change),
        dmc.MenuItem(say("notes_menu"), id={"notes": "menu"}, disabled=not may_change),
        dmc.MenuItem(say("stop_run"), id="run-stop", color="red", disabled=not may_change or facts.has_ended),
        dmc.MenuItem(say("delete_run"), id="run-delete", color="red", disabled="admin" not in facts.may),
        *([] if may_change else [dmc.MenuLabel(say("may_not_change"))]),
    ]
