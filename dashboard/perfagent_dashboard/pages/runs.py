"""The runs page, `/runs`: every run in a table that sorts and filters on the server, keeps its view in the address, and
hands what is picked to compare, tags, or the bin."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import dash_ag_grid as dag
import dash_mantine_components as dmc
from dash import ALL, ClientsideFunction, Dash, Input, Output, State, ctx, dcc, html, no_update

from perfagent_dashboard.components.attributes import OPENS, hyphenated
from perfagent_dashboard.components.feedback import note, nothing, trouble
from perfagent_dashboard.components.fields import search_field
from perfagent_dashboard.components.sweep import FILTERS, address, choices, group_table, link, views_menu
from perfagent_dashboard.components.welcome import welcome
from perfagent_dashboard.pages.buttons import on_press
from perfagent_dashboard.pages.compare import MOST_COMPARED
from perfagent_dashboard.pages.registry import Page
from perfagent_dashboard.pages.run.facts import run_path
from perfagent_dashboard.server_api import Problem, ServerApi
from perfagent_dashboard.viewer import may_in
from perfagent_dashboard.words import STATE_SHAPES, say, title_of

if TYPE_CHECKING:
    from dash.development.base_component import Component

__all__ = ["page"]

_BLOCK = 100
"""Rows that the grid asks for at once."""
_WITH = "verdict,latest,timing,trend"
_SEVERITIES = ("critical", "warning", "info", "healthy", "unknown")


def page(server: ServerApi, address: str) -> Page:
    """address: of the server, for who has no run yet."""
    table = _Table(server, address)
    return Page(name="runs", path="/runs", layout=table.layout, register=table.register, icon="runs", grid=True)


class _Table:
    def __init__(self, server: ServerApi, address: str) -> None:
        self._server, self._address = server, address

    async def layout(
        self, q: str = "", severity: Any = (), state: Any = (), project: str = "", sort: str = "severity", order: str = "",
        columns: str = "", attention: str = "", by: str = "", goal: str = "", **_: Any,
    ) -> Component:  # fmt: skip
        """All of the address."""
        view = {
            "q": q, "severity": _many(severity), "state": _many(state), "project": project or None,
            "attention": attention == "1" or None, "sort": sort, "order": order or None, "columns": columns,
            "by": by, "goal": goal,
        }  # fmt: skip
        try:
            first, everything, groups = await asyncio.gather(
                self._rows(view, 0, 1 if by else _BLOCK), self._server.get("/runs", limit=1), self._groups(view)
            )
        except Problem as problem:
            return trouble(problem)
        if not everything["runs"]:
            told = hyphenated(data_page="live", data_tick="runs-tick", data_title=say("nav_runs"))
            return html.Div(
                [welcome(self._address), dcc.Store(id="runs-tick", data=0)], className="page runs-page", **told
            )
        return html.Div(
            [
                html.Div(
                    [
                        html.H1(say("nav_runs")),
                        html.P(_summary(first["counts"]), id="runs-summary", className="quiet"),
                        *_toolbar(view, groups),
                        views_menu("runs"),
                    ],
                    className="page-head",
                ),
                html.Div(_chips(view, first["counts"]), id="runs-chips", className="chips"),
                html.Div(id="runs-picked"),
                # Callbacks want a table on every page; without rows it asks for none.
                html.Div(dag.AgGrid(id="runs-grid", columnDefs=[]), hidden=True) if by else _grid(view),
                html.Div(_grouped(groups, view) if by else None, id="runs-groups"),
                dcc.Store(id="runs-view", data=view),
                dcc.Store(id="runs-regroup"),
                dcc.Store(id="runs-shown", data=_shown(view, first["counts"])),
                dcc.Store(id="runs-tick", data=0),
            ],
            className="page runs-page",
            **hyphenated(data_page="runs", data_title=say("nav_runs"), data_by=by),
        )  # fmt: skip

    def register(self, app: Dash) -> None:
        app.callback(
            Output("runs-view", "data"),
            Input({"chip": ALL, "of": ALL}, "n_clicks"), Input("runs-search", "value"), Input("runs-project", "value"),
            Input("runs-columns", "value"), State("runs-view", "data"),
            prevent_initial_call=True,
        )(self._choose)  # fmt: skip
        app.callback(
            Output("runs-grid", "getRowsResponse"), Output("runs-chips", "children"), Output("runs-summary", "children"),
            Output("runs-shown", "data"),
            Input("runs-grid", "getRowsRequest"), State("runs-view", "data"), State("runs-shown", "data"),
            prevent_initial_call=True,
        )(self._block)  # fmt: skip
        app.callback(
            Output("runs-grid", "columnDefs"),
            Input("runs-columns", "value"),
            State("runs-view", "data"),
            prevent_initial_call=True,
        )(lambda columns, view: _columns({**view, "columns": ",".join(columns or ())}))
        app.clientside_callback(  # type: ignore[no-untyped-call]
            ClientsideFunction("runs", "viewed"), Output("runs-view", "storage_type"), Input("runs-view", "data"),
            Input("runs-tick", "data"), Input("runs-grid", "getRowsRequest"), prevent_initial_call=True,
        )  # fmt: skip
        app.clientside_callback(  # type: ignore[no-untyped-call]
            ClientsideFunction("sweep", "regroup"), Output("runs-regroup", "storage_type"), Input("by", "value"),
            Input("goal", "value"), prevent_initial_call=True,
        )  # fmt: skip
        app.callback(
            Output("runs-groups", "children"), Output("runs-chips", "children", allow_duplicate=True),
            Output("runs-summary", "children", allow_duplicate=True),
            Input("runs-regroup", "data"), State("runs-view", "data"), prevent_initial_call=True,
        )(self._regroup)  # fmt: skip
        app.callback(Output("runs-picked", "children"), Input("runs-grid", "selectedRows"), prevent_initial_call=True)(
            self._pick
        )
        counts_up, tick = Output("runs-tick", "data", allow_duplicate=True), State("runs-tick", "data")
        picked = [State("runs-grid", "selectedRows"), State({"bulk-tag": ALL}, "value")]
        on_press(app, [counts_up], [{"bulk": ALL}], [*picked, tick], self._bulk)

    # ---- rows

    async def _rows(self, view: dict[str, Any], start: int, end: int, sort: str = "", order: str | None = None) -> Any:
        return await self._server.get(
            "/runs", **{"with": _WITH}, limit=max(1, end - start), offset=start, q=view["q"], severity=view["severity"],
            state=view["state"], project=view["project"], attention=view["attention"], columns=view["columns"],
            sort=sort or view["sort"], order=order or view["order"],
        )  # fmt: skip

    async def _groups(self, view: dict[str, Any]) -> Any:
        filters = {name: view[name] for name in FILTERS}
        metrics = ",".join(name for name in view["columns"].split(",") if not name.startswith("config:"))
        return await self._server.get("/groups", by=view["by"], goal=view["goal"], metrics=metrics, **filters)

    async def _regroup(self, asked: Any, view: dict[str, Any]) -> Any:
        """Of a page that shows groups, when its filters or its runs have changed."""
        if not asked or not view["by"]:
            return no_update, no_update, no_update
        try:
            found, groups = await asyncio.gather(self._rows(view, 0, 1), self._groups(view))
        except Problem as problem:
            return html.P(problem.message, className="hint", role="alert"), no_update, no_update
        return _grouped(groups, view), _chips(view, found["counts"]), _summary(found["counts"])

    async def _block(self, asked: dict[str, Any] | None, view: dict[str, Any], shown: Any) -> Any:
        """shown: what chips and summary are of. They are drawn anew when that changed: each drawing asks the server once
        more."""
        if asked is None:
            return no_update, no_update, no_update, no_update
        model = asked.get("sortModel") or []
        column, order = (model[0]["colId"], model[0]["sort"]) if model else ("", None)
        sort = _sorted_by(column)
        if sort == "severity" and order:
            order = "asc" if order == "desc" else "desc"  # ascending: the worst first, as a verdict is read
        try:
            found = await self._rows(view, asked["startRow"], asked["endRow"], sort, order)
        except Problem as problem:
            told = html.P(problem.message, className="hint", role="alert")
            return {"rowData": [], "rowCount": 0}, told, no_update, None
        rows = {"rowData": found["runs"], "rowCount": found["total"]}
        now = _shown(view, found["counts"])
        if now == shown:
            return rows, no_update, no_update, no_update
        return rows, _chips(view, found["counts"]), _summary(found["counts"]), now

    def _choose(
        self, clicks: Sequence[int | None], text: str, project: str | None, columns: Sequence[str], view: dict[str, Any]
    ) -> Any:
        view = {**view, "q": text or "", "project": project or None, "columns": ",".join(columns or ())}
        asked = ctx.triggered_id
        if asked is None or (isinstance(asked, dict) and not any(clicks)):
            return no_update  # chips were drawn anew, and nobody pressed one
        if isinstance(asked, dict):
            kind, value = asked["of"], asked["chip"]
            if kind == "all":
                view |= {"severity": [], "state": [], "attention": None}
            elif kind == "attention":
                view["attention"] = None if view["attention"] else True
            else:
                held = view[kind]
                view[kind] = [one for one in held if one != value] if value in held else [*held, value]
        return view

    # ---- what is done with several

    async def _pick(self, rows: Sequence[dict[str, Any]] | None) -> Component | None:
        if not rows:
            return None
        try:
            session = await self._server.get("/session")
        except Problem as problem:
            return nothing(problem.message)
        may = {
            scope: all(may_in(session, scope, row.get("project", "")) for row in rows) for scope in ("operate", "admin")
        }
        return _picked(rows, may_change=may["operate"], may_delete=may["admin"])

    async def _bulk(
        self, pressed: Mapping[str, str], rows: Sequence[dict[str, Any]] | None, tags: Sequence[str], tick: int
    ) -> tuple[Any, int]:
        runs = {row["run"]: row["tags"] for row in rows or ()}
        act, tag = pressed["bulk"], next((one.strip() for one in tags if one and one.strip()), "")
        done: Any = no_update
        if act == "tag" and tag:
            await asyncio.gather(
                *(self._server.ask(*_tags(run, [*old, tag])) for run, old in runs.items() if tag not in old)
            )
            done = note(say("tagged", count=len(runs), tag=tag), undo=[_tags(*one) for one in runs.items()])
        elif act == "ack":
            taken = (await self._server.ask("POST", "/alerts/ack", {"runs": [*runs]}))["alerts"]
            done = note(say("done_take", count=len(taken)), undo=[("POST", "/alerts/unack", {"alerts": taken})])
        elif act == "delete":
            await asyncio.gather(*(self._server.ask("DELETE", run_path(run)) for run in runs))
            done = note(say("deleted", count=len(runs)))
        return done, (tick or 0) + 1


def _tags(run: str, tags: Sequence[str]) -> tuple[str, str, dict[str, Any]]:
    """The request that gives the run these tags."""
    return "PATCH", run_path(run), {"tags": [*tags]}


def _sorted_by(column: str) -> str:
    """What the server sorts by, for a column of the grid."""
    return "severity" if column == "verdict" else column.removeprefix("column:")


def _many(value: Any) -> list[str]:
    return [value] if isinstance(value, str) and value else list(value or ())


def _shown(view: dict[str, Any], counts: dict[str, Any]) -> list[Any]:
    return [counts, view["severity"], view["state"], bool(view["attention"])]


def _summary(counts: dict[str, Any]) -> str:
    return say("runs_summary", all=counts["all"], attention=counts["attention"])


def _grouped(found: dict[str, Any], view: dict[str, Any]) -> list[Component]:
    """The groups, and the way to their curves."""
    told = say("groups_summary", runs=found["runs"], groups=len(found["groups"]) + found["more"])
    curves = link(say("compare_groups"), address("/compare", view, by=view["by"], goal=view["goal"]))
    return [html.P([told, curves], className="quiet groups-head"), group_table(found, view)]


def _toolbar(view: dict[str, Any], groups: dict[str, Any]) -> list[Component]:
    chosen = [name for name in view["columns"].split(",") if name]
    return [
        search_field("runs-search", say("runs_search"), view["q"]),
        dmc.TextInput(
            id="runs-project", value=view["project"] or "", placeholder=say("project"), debounce=400, size="sm", w=140,
            **{"aria-label": say("project")},
        ),
        dmc.TagsInput(
            id="runs-columns", value=chosen, placeholder=say("columns_hint"), size="sm", w=240, clearable=True,
            **{"aria-label": say("columns")},
        ),
        *choices(groups, has_goal=bool(view["by"])),
    ]  # fmt: skip


def _chips(view: dict[str, Any], counts: dict[str, Any]) -> list[Component]:
    """Filters with how many runs they let through; a severity or state that no run has is left out."""
    nothing = not (view["severity"] or view["state"] or view["attention"])
    chips = [
        _chip("all", "all", say("all"), counts["all"], pressed=nothing),
        _chip("attention", "attention", say("needs_attention"), counts["attention"], pressed=bool(view["attention"])),
    ]
    for kind, names, held in (
        ("severity", _SEVERITIES, counts["severities"]),
        ("state", STATE_SHAPES, counts["states"]),
    ):
        chosen = view[kind]
        chips += [
            _chip(kind, name, say(f"{kind}_{name}"), held.get(name, 0), pressed=name in chosen)
            for name in names
            if held.get(name) or name in chosen
        ]
    return chips


def _chip(kind: str, value: str, label: str, count: int, *, pressed: bool) -> Component:
    return html.Button(
        [label, html.B(f"{count:,}")],
        id={"chip": value, "of": kind}, type="button", className=f"chip {value}",
        **hyphenated(aria_pressed=str(pressed).lower()),
    )  # fmt: skip


def _picked(rows: Sequence[dict[str, Any]], *, may_change: bool, may_delete: bool) -> Component:
    told: list[Component] = [html.B(say("picked", count=len(rows)))]
    if 2 <= len(rows) <= MOST_COMPARED:
        runs = ",".join(quote(row["run"], safe="") for row in rows)
        told.append(link(say("nav_compare"), f"/compare?runs={runs}"))
    if not may_change:
        return html.Div([*told, html.Span(say("may_not_change"), className="quiet")], className="picked card")
    tag = dmc.TextInput(
        id={"bulk-tag": "tag"}, placeholder=say("tag"), size="xs", w=120, **hyphenated(aria_label=say("tag"))
    )
    told += [tag, _bulk_button("tag"), _bulk_button("ack")]
    if may_delete:
        sure = [html.P(say("delete_sure", count=len(rows))), _bulk_button("delete", color="red")]
        target = dmc.PopoverTarget(say("bulk_delete"), boxWrapperProps=OPENS)
        told.append(dmc.Popover([target, dmc.PopoverDropdown(sure)], withArrow=True))
    return html.Div(told, className="picked card")


def _bulk_button(act: str, **look: Any) -> Component:
    return dmc.Button(say(f"bulk_{act}"), id={"bulk": act}, size="xs", variant="filled" if look else "default", **look)


def _grid(view: dict[str, Any]) -> Component:
    return dag.AgGrid(
        id="runs-grid",
        columnDefs=_columns(view),
        rowModelType="infinite",
        getRowId="params.data.run",
        defaultColDef={"resizable": True, "suppressHeaderMenuButton": True, "sortingOrder": ["asc", "desc", None]},
        dashGridOptions={
            "cacheBlockSize": _BLOCK, "maxBlocksInCache": 40,
            "rowHeight": 46, "headerHeight": 36, "animateRows": False, "suppressCellFocus": False,
            "rowSelection": {"mode": "multiRow", "enableClickSelection": False, "headerCheckbox": False},
            "selectionColumnDef": {"headerName": "✓", "headerTooltip": say("pick")},
            "localeText": {"noRowsToShow": say("no_match")}, "ensureDomOrder": True, "enableCellTextSelection": True,
        },
        className="runs-grid",
        style={"height": "calc(100vh - 210px)", "width": "100%"},
    )  # fmt: skip


def _columns(view: dict[str, Any]) -> list[dict[str, Any]]:
    sort, order = view["sort"], view["order"]
    columns: list[dict[str, Any]] = [
        _column("name", say("column_run"), renderer="RunCell", minWidth=190, flex=2, pinned=None),
        _column("verdict", say("column_verdict"), renderer="VerdictCell", minWidth=250, flex=3),
        _column("state", say("column_state"), renderer="StateCell", width=130),
        _column("step", say("column_step"), value="cellStep", width=90, number=True),
        _column("timing.throughput", say("column_throughput"), value="cellThroughput", width=130, number=True, sortable=False),
        _column("loss", say("column_loss"), value="cellLoss", width=95, number=True),
        _column("trend", say("column_trend"), renderer="TrendCell", width=136, sortable=False),
        _column("gpu/utilization_pct", say("column_gpu"), value="cellMetric", width=80, number=True),
        _column("updated", say("column_seen"), renderer="SeenCell", width=115, number=True),
    ]  # fmt: skip
    # Beside the verdict: who chose them looks for them.
    columns[2:2] = [_chosen_column(name) for name in view["columns"].split(",") if name]
    for column in columns:
        if _sorted_by(column["colId"]) == sort:
            column["initialSort"] = "asc" if sort == "severity" else (order or "desc")
    return columns


def _chosen_column(name: str) -> dict[str, Any]:
    """Of a metric, or of a setting of the runs."""
    setting = name.removeprefix("config:")
    title, value = (title_of(name), "cellMetric") if setting == name else (setting, "cellSetting")
    return _column(f"column:{name}", title, value=value, width=120, minWidth=96, number=True, headerTooltip=name)


def _column(
    name: str, title: str, *, renderer: str = "", value: str = "", number: bool = False, **look: Any
) -> dict[str, Any]:
    made = {"colId": name, "headerName": title, "sortable": True, "minWidth": look.get("width"), **look}
    if renderer:
        made |= {"cellRenderer": renderer, "field": name}
    if value:
        made["valueGetter"] = {"function": f"{value}(params)"}
    if number:
        made["type"] = "rightAligned"
    return made
