"""The Media tab: images, sounds, tables and histograms that the script logged. A slider chooses the step. The page requests
only the items that it shows."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import dash_mantine_components as dmc
from dash import dcc, html

from perfagent.wire.media import MEDIA_KINDS
from perfagent.wire.quantities import size
from perfagent_dashboard.components.attributes import hyphenated
from perfagent_dashboard.components.digest import digest
from perfagent_dashboard.components.feedback import nothing
from perfagent_dashboard.components.parts import graph
from perfagent_dashboard.components.tables import table
from perfagent_dashboard.figures.histograms import histogram_figure
from perfagent_dashboard.pages.run.facts import RunFacts, run_path
from perfagent_dashboard.server_api import Problem, ServerApi
from perfagent_dashboard.words import say

if TYPE_CHECKING:
    from dash.development.base_component import Component

__all__ = ["SLIDER", "content", "logged", "sections"]

SLIDER = "media-at"
_NAMES, _ROWS, _POINTS, _ITEMS, _TABLES = 30, 100, 120, 1000, 10


async def content(server: ServerApi, facts: RunFacts) -> list[Component]:
    found = await logged(server, facts.id)
    shown = await sections(server, facts.id, found, {})
    store = dcc.Store(id="media-shown", data=digest([found, {}]))
    return [store, html.Div(shown, id="media-sections", className="stack")]


async def logged(server: ServerApi, run: str) -> dict[str, Any]:
    """Under which names, of which steps. Media never change: where this is as it was, so is all that is shown."""
    found = await server.get(run_path(run, "media"), limit=1)
    return {"names": found["names"], "left_out": found["left_out"]}


async def sections(server: ServerApi, run: str, found: Mapping[str, Any], chosen: Mapping[str, int]) -> list[Component]:
    """found: of `logged`. chosen: by kind and name, up to which step; without one the newest is shown, whichever that is."""
    names = sorted(found["names"], key=lambda one: (MEDIA_KINDS.index(one["kind"]), one["name"]))
    parts = await asyncio.gather(
        *(_section(server, run, one, chosen.get(f"{one['kind']} {one['name']}")) for one in names[:_NAMES])
    )
    said = [nothing(say("media_left_out", count=found["left_out"]))] if found["left_out"] else []
    more = [nothing(say("media_more_names", count=len(names) - _NAMES))] if len(names) > _NAMES else []
    return [*said, *parts, *more] or [nothing(say("media_none"))]


async def _section(server: ServerApi, run: str, one: Mapping[str, Any], at: int | None) -> Component:
    head = [html.H2(one["name"]), html.Span(say(f"media_{one['kind']}", count=one["items"], size=size(one["bytes"])))]
    if one["kind"] == "histogram":
        told = await server.get(run_path(run, "media", "histograms"), name=one["name"], limit=_POINTS)
        shown: list[Component] = [_histograms(told["histograms"])] if told["histograms"] else []
    else:
        last = one["last_step"] if at is None else at
        listed = await server.get(run_path(run, "media"), name=one["name"], at=last, limit=_ITEMS)
        items = [item for item in listed["media"] if item["kind"] == one["kind"]]
        several = len({item["rank"] for item in items}) > 1
        head += [*_slider(one, last), *([html.B(f"{say('step')} {items[0]['step']:,}")] if items else [])]
        shown = [await _SHOWN[one["kind"]](server, items, several=several)]
    return html.Section([html.Div(head, className="media-head"), *shown], className="part media")


def _slider(one: Mapping[str, Any], at: int) -> list[Component]:
    """Over the steps, as far apart as they are."""
    if len(one["at"]) < 2:
        return []
    return [
        dmc.Slider(
            id={"type": SLIDER, "name": f"{one['kind']} {one['name']}"}, min=one["at"][0], max=one["at"][-1], value=at,
            size="xs", restrictToMarks=True, marks=[{"value": step} for step in one["at"]],
            thumbLabel=say("media_slider", name=one["name"]),
        )
    ]  # fmt: skip


async def _images(_server: ServerApi, items: Sequence[Mapping[str, Any]], *, several: bool) -> Component:
    return html.Div(
        [
            html.Button(
                [
                    dmc.Image(src=item["url"], alt="" if _caption(item, several) else item["name"], attributes=_lazy(item)),
                    html.Span(_caption(item, several)),
                ],
                type="button", className="picture", title=say("media_enlarge"), **hyphenated(data_enlarge="1"),
            )
            for item in items
        ],
        className="pictures",
    )  # fmt: skip


def _lazy(item: Mapping[str, Any]) -> dict[str, Any]:
    """Fetched when it comes into view, for which its place is kept."""
    known = {side: item[side] for side in ("width", "height") if item[side]}
    return {"root": {"loading": "lazy", **known}}


async def _sounds(_server: ServerApi, items: Sequence[Mapping[str, Any]], *, several: bool) -> Component:
    return html.Div(
        [
            html.Figure(
                [html.Audio(src=item["url"], controls=True, preload="none"), html.Figcaption(_caption(item, several))]
            )
            for item in items
        ],
        className="sounds",
    )


async def _tables(server: ServerApi, items: Sequence[Mapping[str, Any]], *, several: bool) -> Component:
    shown: list[Component] = []
    for item in items[:_TABLES]:
        try:
            told = await server.get(item["url"].removeprefix("/api/v1"))
        except Problem:  # it went for newer ones just now
            continue
        rows = [[*map(_cell, row)] for row in told["rows"][:_ROWS]]
        shown += [html.P(_caption(item, several), className="quiet")] if _caption(item, several) else []
        whole = table(told["columns"], rows, empty=say("media_no_rows"))
        shown.append(html.Div(whole, className="scrolls", tabIndex=0))
        if told["count"] > _ROWS:
            link = html.A(say("media_rows_kept", count=len(told["rows"])), href=item["url"], target="_blank")
            shown.append(
                html.P([say("media_more_rows", count=told["count"] - len(rows)), " ", link], className="quiet")
            )
    left = len(items) - _TABLES
    return html.Div([*shown, nothing(say("and_more", count=left)) if left > 0 else None], className="stack")


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


def _histograms(found: Sequence[Mapping[str, Any]]) -> Component:
    bad = sum(one["nonfinite"] for one in found)
    told = html.P(say("media_nonfinite", count=bad), className="quiet") if bad else None
    return html.Div([graph(histogram_figure(found), 240), told])


def _caption(item: Mapping[str, Any], several: bool) -> str:
    rank = f"{say('rank')} {item['rank']}" if several else ""
    return ": ".join(part for part in (rank, item["caption"]) if part)


_SHOWN = {"image": _images, "audio": _sounds, "table": _tables}
