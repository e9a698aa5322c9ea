"""Configuration: what the user set, what the agent found, the code, the environment and the packages."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import yaml
from dash import dcc, html

from perfagent.wire.configuration import divided, flattened
from perfagent_client.techniques import sentences
from perfagent_dashboard.components.attributes import hyphenated
from perfagent_dashboard.components.feedback import nothing
from perfagent_dashboard.components.fields import search_field
from perfagent_dashboard.pages.run.facts import RunFacts
from perfagent_dashboard.server_api import ServerApi
from perfagent_dashboard.words import say

if TYPE_CHECKING:
    from dash.development.base_component import Component

__all__ = ["content", "sections"]

_LONG = 90


async def content(server: ServerApi, facts: RunFacts) -> list[Component]:
    return [
        html.Div(
            [
                search_field("config-search", say("config_search")),
                dcc.Clipboard(content=_yaml(facts.run["config"]), title=say("copy_yaml"), className="button small"),
                html.Span(say("copy_yaml"), className="quiet"),
                *await _previous(server, facts),
            ],
            className="tab-tools",
        ),
        html.Div(sections(facts.run, ""), id="config-sections"),
    ]  # fmt: skip


def sections(run: Mapping[str, Any], search: str) -> list[Component]:
    """search: words that the name or the value must have. A section that has none of them is left out."""
    words = search.lower().split()
    shown = []
    for name, table in _tables(run):
        rows = [(key, value) for key, value in table if all(word in f"{key} {value}".lower() for word in words)]
        if rows:
            shown.append(_section(name, rows, is_open=bool(words) or name in ("config_yours", "config_found")))
    return shown or [nothing(say("nothing_found" if words else "config_none"))]


def _tables(run: Mapping[str, Any]) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    lines = sentences(run["config"], lambda key, size: say(f"saves_{key}", size=size))
    techniques = [(line.partition(": ")[0], line.partition(": ")[2]) for line in lines]
    for group, table in divided(run["config"], run["meta"]).items():
        told = {name: value for name, value in table.items() if name != "techniques"} if group == "found" else table
        entries = [(name, _spelled(name, value)) for name, value in flattened(told)]
        yield f"config_{group}", [*entries, *techniques] if group == "found" else entries


def _spelled(key: str, value: Any) -> str:
    if isinstance(value, list) and all(not isinstance(one, (list, Mapping)) for one in value):
        return (" " if key == "command" else ", ").join(map(str, value))
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _section(name: str, rows: list[tuple[str, str]], *, is_open: bool) -> Component:
    entries = [
        html.Div([html.Dt(key), html.Dd(value)], className="long" if len(key) + len(value) > _LONG else "")
        for key, value in rows
    ]
    head = html.Summary([say(name), " ", html.Span(str(len(rows)), className="quiet")])
    return html.Details([head, html.Dl(entries, className="config")], open=is_open, className="card")


def _yaml(config: Mapping[str, Any]) -> str:
    return str(yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True))


async def _previous(server: ServerApi, facts: RunFacts) -> list[Component]:
    """A link to what differs from the run of the project that started before this one."""
    listed = (await server.get("/runs", project=facts.run["project"], limit=200))["runs"]
    earlier = [run for run in listed if run["started"] < facts.run["started"] and run["run"] != facts.id]
    if not earlier:
        return []
    before = max(earlier, key=lambda run: run["started"])
    link = f"/compare?runs={quote(before['run'], safe='')},{quote(facts.id, safe='')}"
    name = before["name"] or before["run"]
    return [html.A(say("differs_from", run=name), href=link, className="button", **hyphenated(data_nav=link))]
