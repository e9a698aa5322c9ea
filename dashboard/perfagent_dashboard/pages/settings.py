"""The settings page, `/settings`: who is told (channels, each with a test), what is judged (rules and their thresholds),
who may come in (keys), what things cost, and how much is kept. Alerts of one's own: settings_alerts.py; users, the
audit log and one's own login: settings_people.py."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from urllib.parse import quote

import dash_mantine_components as dmc
from dash import ALL, Dash, Input, Output, State, ctx, dcc, html, no_update, set_props
from dash.development.base_component import Component

from perfagent.wire.quantities import size
from perfagent_dashboard import ids
from perfagent_dashboard.components.attributes import hyphenated
from perfagent_dashboard.components.feedback import note, nothing, trouble
from perfagent_dashboard.components.numbers import number
from perfagent_dashboard.components.prose import prose
from perfagent_dashboard.components.tables import table
from perfagent_dashboard.components.times import ago, moment
from perfagent_dashboard.pages.registry import Page
from perfagent_dashboard.pages.settings_alerts import OwnAlerts
from perfagent_dashboard.pages.settings_people import People
from perfagent_dashboard.server_api import Problem, ServerApi
from perfagent_dashboard.viewer import may_in
from perfagent_dashboard.words import LANGUAGES, language, say, sentence

__all__ = ["page"]

_KINDS = ("webhook", "slack", "discord", "teams", "feishu", "dingtalk", "wecom", "email", "heartbeat")
_SEVERITIES = ("info", "warning", "critical")
_SCOPES = ("read", "operate", "ingest", "admin")
_SECTIONS = ("channels", "rules", "keys", "users", "prices", "storage", "audit", "account")
_AMOUNTS = ("gpu_hour", "cpu_core_hour", "kwh")
_LIMITS = ("requests_per_s", "samples_per_s", "bytes_per_s", "runs_per_hour")


def page(server: ServerApi) -> Page:
    settings = _Settings(server)
    return Page(name="settings", path="/settings", layout=settings.layout, register=settings.register, icon="settings")


class _Settings:
    def __init__(self, server: ServerApi) -> None:
        self._server, self._people, self._own = server, People(server), OwnAlerts(server)

    async def layout(self, tab: str = "channels", **_: Any) -> Component:
        """tab: of the address."""
        try:
            session = await self._server.get("/session")
            shown = [name for name in _SECTIONS if _may_see(name, session) or not session["user"]]
            tab = tab if tab in shown else shown[0]
            content = await self._section(tab, session)
        except Problem as problem:
            return trouble(problem)
        tabs = [dmc.TabsTab(say(f"settings_{name}"), value=name, **hyphenated(data_value=name)) for name in shown]
        panels = [
            dmc.TabsPanel(
                html.Div(content if name == tab else [], id=f"settings-{name}", className="stack"), value=name, pt="md"
            )
            for name in shown
        ]
        return html.Div(
            [
                html.Div([html.H1(say("nav_settings"))], className="page-head"),
                dmc.Tabs([dmc.TabsList(tabs), *panels], value=tab, id="settings-tab"),
                dcc.Store(id="settings-built", data=[tab]),
            ],
            className="page settings-page",
            **hyphenated(data_page="live", data_title=say("nav_settings"), data_address="settings-tab:tab:channels"),
        )

    def register(self, app: Dash) -> None:
        told = Output(ids.NOTES, "sendNotifications", allow_duplicate=True)
        app.callback(
            Output("settings-built", "data"),
            Input("settings-tab", "value"), State("settings-built", "data"),
            prevent_initial_call=True,
        )(self._opened)  # fmt: skip
        app.callback(
            told, Output("settings-channels", "children"),
            Input("channel-add", "n_clicks"), Input({"channel-act": ALL, "channel": ALL}, "n_clicks"),
            State("channel-kind", "value"), State("channel-url", "value"), State("channel-name", "value"),
            State("channel-severity", "value"), State("channel-language", "value"),
            prevent_initial_call=True,
        )(self._channels)  # fmt: skip
        app.callback(
            told, Output("settings-keys", "children"),
            Input("key-add", "n_clicks"), Input({"key": ALL}, "n_clicks"),
            State("key-scope", "value"), State("key-name", "value"), State("key-project", "value"),
            *(State(f"key-{name}", "value") for name in _LIMITS),
            prevent_initial_call=True,
        )(self._keys)  # fmt: skip
        app.callback(
            told, Output("settings-rules", "children"),
            Input({"rule-save": ALL}, "n_clicks"), Input({"rule-reset": ALL}, "n_clicks"), Input("rules-project", "value"),
            State("rules-shown", "data"), State({"rule-on": ALL}, "checked"), State({"rule-on": ALL}, "id"),
            State({"threshold": ALL, "of": ALL}, "value"), State({"threshold": ALL, "of": ALL}, "id"),
            prevent_initial_call=True,
        )(self._rules)  # fmt: skip
        app.callback(
            told, Output("settings-prices", "children"),
            Input("price-set", "n_clicks"), Input({"price": ALL}, "n_clicks"),
            State("price-project", "value"), *(State(f"price-{name}", "value") for name in _AMOUNTS),
            State("price-currency", "value"),
            prevent_initial_call=True,
        )(self._prices)  # fmt: skip
        self._people.register(app)
        self._own.register(app)

    async def _opened(self, tab: str, built: list[str]) -> Any:
        """A tab is built when it is first opened."""
        if tab in built:
            return no_update
        try:
            content = await self._section(tab, await self._server.get("/session"))
        except Problem as problem:
            content = trouble(problem)
        set_props(f"settings-{tab}", {"children": content})
        return [*built, tab]

    async def _section(self, name: str, session: dict[str, Any]) -> Any:
        """What is in a tab; how to come in, where it is shown to somebody who has not logged in as a user."""
        if not _may_see(name, session):
            return html.P(prose(say("admin_only")), className="hint")
        if name == "account":
            return await self._people.account(session)
        shown: dict[str, Callable[..., Awaitable[Any]]] = {
            "channels": self._channel_list, "rules": self._rule_list, "keys": self._key_list, "prices": self._price_list,
            "storage": self._storage, "users": self._people.users, "audit": self._people.audit,
        }  # fmt: skip
        return await shown[name](may_change="admin" in session["may"] if name == "keys" else may_in(session, "admin"))

    # ---- channels

    async def _channel_list(self, *, may_change: bool, secret: str = "") -> list[Component]:  # noqa: ARG002
        known = (await self._server.get("/channels"))["channels"]
        rows = [
            [
                one["kind"], html.B(one["name"]), html.Code(one["url"]), say(f"severity_{one['min_severity']}"),
                say("on") if one["enabled"] else html.Span([say("off"), ": ", one["disabled_reason"]], className="bad"),
                html.Div(
                    [_channel_button(one, act) for act in ("test", "rotate", "remove") if _can(one, act)], className="actions"
                ),
            ]
            for one in known
        ]  # fmt: skip
        kinds = [{"value": one, "label": say(f"kind_{one}")} for one in _KINDS]
        severities = [{"value": one, "label": say(f"severity_{one}")} for one in _SEVERITIES]
        languages = [{"value": one, "label": sentence(one, "language_name")} for one in LANGUAGES]
        form = html.Div(
            [
                _choice("channel-kind", say("channel_kind"), kinds, "webhook"),
                dmc.TextInput(id="channel-url", label=say("channel_url"), size="sm", w=360),
                dmc.TextInput(id="channel-name", label=say("channel_name"), size="sm"),
                _choice("channel-severity", say("channel_severity"), severities, "warning"),
                _choice("channel-language", say("channel_language"), languages, language()),
                dmc.Button(say("channel_add"), id="channel-add", size="sm"),
            ],
            className="form-row",
        )  # fmt: skip
        heads = [say(f"channel_{name}") for name in ("kind", "name", "url", "severity", "state")]
        return [
            *([_secret(say("channel_secret"), secret)] if secret else []),
            table([*heads, ""], rows, empty=say("channels_none")),
            form,
        ]

    async def _channels(
        self, add: int | None, acts: Sequence[int | None], kind: str, url: str, name: str, severity: str, spoken: str
    ) -> Any:
        asked = ctx.triggered_id
        secret = ""
        try:
            if asked == "channel-add" and add:
                body: dict[str, Any] = {
                    "kind": kind, "url": (url or "").strip(), "min_severity": severity, "language": spoken,
                }  # fmt: skip
                body |= {"name": name.strip()} if (name or "").strip() else {}
                body |= {"every_s": 60} if kind == "heartbeat" else {}
                secret = (await self._server.ask("POST", "/channels", body))["secret"] or ""
                said = note(say("channel_added"))
            elif isinstance(asked, dict) and any(acts):
                said, secret = await self._act_on_channel(asked["channel-act"], asked["channel"])
            else:
                return no_update, no_update
        except Problem as problem:
            return note(problem.message, failed=True), no_update
        return said, await self._channel_list(may_change=True, secret=secret)

    async def _act_on_channel(self, act: str, channel: str) -> tuple[Any, str]:
        path = f"/channels/{quote(channel, safe='')}"
        if act == "remove":
            await self._server.ask("DELETE", path)
            return note(say("channel_removed")), ""
        made = await self._server.ask("POST", f"{path}/{act}")
        if act == "rotate":
            return note(say("channel_rotated")), str(made["secret"])
        arrived = bool(made.get("delivered"))
        why = made.get("error") or f"status {made.get('status')}"
        return note(say("test_arrived") if arrived else say("test_failed", why=why), failed=not arrived), ""

    # ---- keys

    async def _key_list(self, *, may_change: bool, secret: str = "") -> list[Component]:  # noqa: ARG002
        known = (await self._server.get("/keys"))["keys"]
        rows = [
            [
                html.B(one["name"] or one["id"]), one["scope"], one["project"] or say("all_projects"), _own_limits(one["limits"]),
                moment(one["created"]), ago(one["used"]) if one["used"] else say("never"),
                moment(one["expires"]) if one["expires"] else say("never"),
                say("key_revoked") if one["revoked"] else dmc.Button(
                    say("key_revoke"), id={"key": one["id"]}, size="compact-sm", variant="default"
                ),
            ]
            for one in known
        ]  # fmt: skip
        scopes = [{"value": one, "label": say(f"scope_{one}")} for one in _SCOPES]
        form = html.Div(
            [
                _choice("key-scope", say("key_scope"), scopes, "operate", w=320),
                dmc.TextInput(id="key-name", label=say("key_name"), size="sm"),
                dmc.TextInput(id="key-project", label=say("key_project"), placeholder=say("all_projects"), size="sm"),
            ],
            className="form-row",
        )  # fmt: skip
        limits = [
            dmc.TextInput(id=f"key-{name}", label=say(name), placeholder=say("limit_of_server"), size="sm", w=180)
            for name in _LIMITS
        ]
        heads = [say(f"key_{name}") for name in ("name", "scope", "project", "limits", "created", "used", "expires")]
        return [
            *([_secret(say("key_secret"), secret)] if secret else []),
            table([*heads, ""], rows, empty=say("keys_none")),
            form,
            html.Div(limits, className="form-row"),
            nothing(say("key_limits_how")),
            html.Div(dmc.Button(say("key_add"), id="key-add", size="sm")),
        ]

    async def _keys(
        self, add: int | None, revoked: Sequence[int | None], scope: str, name: str, project: str, *limits: str
    ) -> Any:
        asked, secret = ctx.triggered_id, ""
        try:
            if asked == "key-add" and add:
                own = {limit: text.strip() for limit, text in zip(_LIMITS, limits, strict=True) if (text or "").strip()}
                body: dict[str, Any] = {"scope": scope, "name": (name or "").strip(), "limits": own}
                body |= {"project": project.strip()} if (project or "").strip() else {}
                secret = (await self._server.ask("POST", "/keys", body))["key"]
                said = say("key_added")
            elif isinstance(asked, dict) and any(revoked):
                await self._server.ask("DELETE", f"/keys/{quote(asked['key'], safe='')}")
                said = say("key_gone")
            else:
                return no_update, no_update
        except Problem as problem:
            return note(problem.message, failed=True), no_update
        return note(said), await self._key_list(may_change=True, secret=secret)

    # ---- rules

    async def _rule_list(self, *, may_change: bool, project: str = "", unfolded: str = "") -> list[Component]:
        known = await self._server.get("/rules", project=project)
        items = [_rule_item(one, may_change=may_change) for one in known["rules"]]
        which = dmc.TextInput(
            id="rules-project", label=say("rules_project"), value=project, debounce=500, size="sm", w=260,
            placeholder=say("all_projects"),
        )  # fmt: skip
        shown = dcc.Store(id="rules-shown", data=project)
        return [
            which,
            shown,
            html.Div(await self._own.section(project, may_change=may_change), id="own-alerts", className="stack"),
            html.H2(say("rules_of_server")),
            *([] if may_change else [nothing(say("may_not_set_rules"))]),
            *(nothing(say("rule_setting_ignored", why=one["why"])) for one in known["ignored"]),
            dmc.Accordion(items, multiple=True, value=[unfolded] if unfolded else [], className="card"),
        ]

    async def _rules(
        self, saves: Sequence[int | None], resets: Sequence[int | None], project: str, shown: str, on: Sequence[bool],
        on_ids: Sequence[Any], values: Sequence[Any], value_ids: Sequence[Any],
    ) -> Any:  # fmt: skip
        asked, project = ctx.triggered_id, (project or "").strip()
        said: Any = no_update
        try:
            if isinstance(asked, dict) and "rule-save" in asked and any(saves):
                rule = asked["rule-save"]
                enabled = next(bool(one) for one, which in zip(on, on_ids, strict=True) if which["rule-on"] == rule)
                thresholds = {
                    which["threshold"]: float(value)
                    for value, which in zip(values, value_ids, strict=True)
                    if which["of"] == rule and value not in (None, "")
                }
                body = {"enabled": enabled, "thresholds": thresholds}
                await self._server.ask("PUT", f"/rules/{rule}", body, query={"project": project})
                said = note(say("rule_saved"))
            elif isinstance(asked, dict) and "rule-reset" in asked and any(resets):
                await self._server.ask("DELETE", f"/rules/{asked['rule-reset']}", query={"project": project})
                said = note(say("rule_reset_done"))
            elif asked != "rules-project" or project == shown:  # or the form has only just come into the page
                return no_update, no_update
            may_change = may_in(await self._server.get("/session"), "admin", project)
            unfolded = next(iter(asked.values())) if isinstance(asked, dict) else ""
            return said, await self._rule_list(may_change=may_change, project=project, unfolded=unfolded)
        except Problem as problem:
            return note(problem.message, failed=True), no_update

    # ---- prices and storage

    async def _price_list(self, *, may_change: bool) -> list[Component]:
        known = (await self._server.get("/prices"))["prices"]
        rows = [
            [
                html.B(one["project"] or say("all_others")),
                *("" if one[name] is None else f"{one[name]:g} {one['currency']}" for name in _AMOUNTS),
                dmc.Button(say("remove"), id={"price": one["project"]}, size="compact-sm", variant="default")
                if may_change
                else "",
            ]
            for one in known
        ]  # fmt: skip
        form = html.Div(
            [
                dmc.TextInput(id="price-project", label=say("project"), placeholder=say("all_others"), size="sm"),
                *(dmc.NumberInput(id=f"price-{name}", label=say(f"price_{name}"), min=0, size="sm", w=150) for name in _AMOUNTS),
                dmc.TextInput(id="price-currency", label=say("price_currency"), value="EUR", size="sm", w=100),
                dmc.Button(say("price_set"), id="price-set", size="sm"),
            ],
            className="form-row",
        )  # fmt: skip
        heads = [say("project"), *(say(f"price_{name}") for name in _AMOUNTS), ""]
        return [table(heads, rows, empty=say("prices_none")), form if may_change else html.Span()]

    async def _prices(
        self, put: int | None, removed: Sequence[int | None], project: str, gpu: Any, core: Any, kwh: Any, currency: str
    ) -> Any:
        asked = ctx.triggered_id
        try:
            if asked == "price-set" and put:
                amounts = zip(_AMOUNTS, (gpu, core, kwh), strict=True)
                body = {name: float(value) for name, value in amounts if value not in (None, "")}
                query = {"project": (project or "").strip()}
                await self._server.ask("PUT", "/prices", body | {"currency": (currency or "").strip()}, query=query)
                said = say("price_is_set")
            elif isinstance(asked, dict) and any(removed):
                await self._server.ask("DELETE", "/prices", query={"project": asked["price"]})
                said = say("price_removed")
            else:
                return no_update, no_update
        except Problem as problem:
            return note(problem.message, failed=True), no_update
        return note(said), await self._price_list(may_change=True)

    async def _storage(self, *, may_change: bool) -> list[Component]:  # noqa: ARG002
        about = await self._server.get("/self")
        storage, kept = about["storage"], about["retention_days"]
        facts = [
            *(
                (say(f"storage_{name}"), size(storage[f"{name}_bytes"]))
                for name in ("database", "free")
                if storage  # it tells of all projects, which not everybody may see
            ),
            *((say(f"kept_{name}"), _days(days)) for name, days in kept.items()),
            (say("storage_budget"), _budget(about["max_bytes"])),
            (say("version"), about["version"]),
        ]  # fmt: skip
        return [
            html.Dl([html.Div([html.Dt(name), html.Dd(value)]) for name, value in facts], className="config card"),
            html.P(prose(say("storage_how")), className="hint"),
        ]


def _may_see(name: str, session: dict[str, Any]) -> bool:
    if name in ("channels", "users"):
        return may_in(session, "admin")
    return name not in ("keys", "audit") or "admin" in session["may"]


def _days(days: float | None) -> str:
    return say("for_ever") if days is None else say("days", count=days)


def _budget(limit: float | None) -> str:
    return say("no_limit") if limit is None else size(limit)


def _own_limits(limits: dict[str, Any]) -> Any:
    """A line each; what a key has not of its own it has of the server."""
    lines = [html.Div(f"{say(name)}: {_limit(name, number(limits[name]))}") for name in _LIMITS if name in limits]
    return html.Div(lines) if lines else say("limit_of_server")


def _limit(name: str, value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return say("no_limit")
    return size(value) if name == "bytes_per_s" else f"{value:,g}"


def _choice(ident: str, label: str, data: list[dict[str, str]], value: str, **look: Any) -> Component:
    return dmc.Select(id=ident, label=label, data=data, value=value, size="sm", allowDeselect=False, **look)


def _can(channel: dict[str, Any], act: str) -> bool:
    return act != "rotate" or channel["kind"] == "webhook"


def _channel_button(channel: dict[str, Any], act: str) -> Component:
    ident = {"channel-act": act, "channel": channel["id"]}
    return dmc.Button(say(f"channel_{act}"), id=ident, size="compact-sm", variant="default")


def _secret(title: str, secret: str) -> Component:
    """Shown once."""
    return dmc.Alert(
        html.Div([html.Code(secret), dcc.Clipboard(content=secret, className="copy", title=say("copy"))], className="secret"),
        title=title, color="yellow",
    )  # fmt: skip


def _rule_item(rule: dict[str, Any], *, may_change: bool) -> Component:
    changed = rule["thresholds"] != rule["defaults"] or not rule["enabled"]
    told = rule["words"][language()]
    marks = [html.Span(say("rule_off"), className="bad")] if not rule["enabled"] else []
    marks += [html.Span(say("rule_changed"), className="quiet")] if changed and rule["enabled"] else []
    fields = [
        dmc.NumberInput(
            id={"threshold": name, "of": rule["rule"]}, label=name.replace("_", " "), value=value, size="sm", w=150,
            description=say("rule_default", value=f"{rule['defaults'][name]:g}", unit=rule["units"].get(name, "")),
            disabled=not may_change,
        )
        for name, value in rule["thresholds"].items()
    ]  # fmt: skip
    switch = dmc.Switch(
        id={"rule-on": rule["rule"]}, label=say("rule_on"), checked=rule["enabled"], disabled=not may_change
    )
    buttons = [
        dmc.Button(say("save"), id={"rule-save": rule["rule"]}, size="sm"),
        dmc.Button(say("rule_reset"), id={"rule-reset": rule["rule"]}, size="sm", variant="default"),
    ]
    return dmc.AccordionItem(
        [
            dmc.AccordionControl(html.Span([html.B(told["name"]), " ", *marks])),
            dmc.AccordionPanel(
                [
                    html.P(told["meaning"]),
                    html.P(told["fires"], className="quiet"),
                    html.Div([switch, *fields, *(buttons if may_change else [])], className="form-row"),
                ]
            ),
        ],
        value=rule["rule"],
    )
