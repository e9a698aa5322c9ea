"""The settings page, `/settings`: who is told (channels, each with a test), what is judged (rules and their thresholds),
who may come in (keys), what things cost, and how much is kept. Alerts of one's own: settings_alerts.py; users, the
audit log and one's own login: settings_people.py."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any
from urllib.parse import quote

import dash_mantine_components as dmc
from dash import ALL, Dash, Input, Output, State, dcc, html, no_update, set_props
from dash.development.base_component import Component

from perfagent.wire import SEVERITIES
from perfagent.wire.quantities import size
from perfagent_dashboard.components.attributes import hyphenated
from perfagent_dashboard.components.feedback import note, nothing, trouble
from perfagent_dashboard.components.fields import form_row, number_field, select_field, small_button, text_field
from perfagent_dashboard.components.numbers import filled, number
from perfagent_dashboard.components.prose import prose
from perfagent_dashboard.components.tables import table
from perfagent_dashboard.components.times import ago, moment, or_never
from perfagent_dashboard.pages.buttons import on_press
from perfagent_dashboard.pages.registry import Page
from perfagent_dashboard.pages.settings_alerts import OwnAlerts
from perfagent_dashboard.pages.settings_people import People
from perfagent_dashboard.server_api import Problem, ServerApi
from perfagent_dashboard.viewer import may_in
from perfagent_dashboard.words import LANGUAGES, language, say, sentence

__all__ = ["page"]

_KINDS = ("webhook", "slack", "discord", "teams", "feishu", "dingtalk", "wecom", "email", "heartbeat")
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
        app.callback(
            Output("settings-built", "data"),
            Input("settings-tab", "value"), State("settings-built", "data"),
            prevent_initial_call=True,
        )(self._opened)  # fmt: skip
        channels, keys, rules, prices = (
            [Output(f"settings-{name}", "children")] for name in ("channels", "keys", "rules", "prices")
        )
        of_channel = ("kind", "url", "name", "severity", "language")
        on_press(
            app, channels, ["channel-add", {"channel-act": ALL, "channel": ALL}],
            [f"channel-{name}" for name in of_channel], self._change_channels,
        )  # fmt: skip
        of_key = ("scope", "name", "project", *_LIMITS)
        on_press(app, keys, ["key-add", {"key": ALL}], [f"key-{name}" for name in of_key], self._change_keys)
        on_press(
            app, rules, [{"rule-save": ALL}, {"rule-reset": ALL}, Input("rules-project", "value")],
            [
                "rules-project", State("rules-shown", "data"), State({"rule-on": ALL}, "checked"), State({"rule-on": ALL}, "id"),
                State({"threshold": ALL, "of": ALL}, "value"), State({"threshold": ALL, "of": ALL}, "id"),
            ],
            self._change_rules,
        )  # fmt: skip
        of_price = ("project", "currency", *_AMOUNTS)
        on_press(
            app, prices, ["price-set", {"price": ALL}], [f"price-{name}" for name in of_price], self._change_prices
        )
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
        may_change = may_in(session, "admin")
        shown: dict[str, Callable[[], Awaitable[Any]]] = {
            "channels": self._channels, "keys": self._keys, "storage": self._storage, "users": self._people.users,
            "audit": self._people.audit, "account": partial(self._people.account, session),
            "rules": partial(self._rules, may_change=may_change), "prices": partial(self._prices, may_change=may_change),
        }  # fmt: skip
        return await shown[name]()

    # ---- channels

    async def _channels(self, secret: str = "") -> list[Component]:
        known = (await self._server.get("/channels"))["channels"]
        rows = [
            [
                one["kind"], html.B(one["name"]), html.Code(one["url"]), say(f"severity_{one['min_severity']}"),
                say("on") if one["enabled"] else html.Span([say("off"), ": ", one["disabled_reason"]], className="bad"),
                html.Div(
                    [
                        small_button(say(f"channel_{act}"), {"channel-act": act, "channel": one["id"]})
                        for act in ("test", "rotate", "remove") if act != "rotate" or one["kind"] == "webhook"
                    ],
                    className="actions",
                ),
            ]
            for one in known
        ]  # fmt: skip
        severities: dict[str, str] = {one: say(f"severity_{one}") for one in SEVERITIES}
        languages = {one: sentence(one, "language_name") for one in LANGUAGES}
        form = form_row(
            select_field("channel-kind", say("channel_kind"), {one: say(f"kind_{one}") for one in _KINDS}, "webhook"),
            text_field("channel-url", say("channel_url"), w=360),
            text_field("channel-name", say("channel_name")),
            select_field("channel-severity", say("channel_severity"), severities, "warning"),
            select_field("channel-language", say("channel_language"), languages, language()),
            dmc.Button(say("channel_add"), id="channel-add", size="sm"),
        )
        heads = [say(f"channel_{name}") for name in ("kind", "name", "url", "severity", "state")]
        return [*_secret("channel_secret", secret), table([*heads, ""], rows, empty=say("channels_none")), form]

    async def _change_channels(
        self, pressed: Any, kind: str, url: str, name: str, severity: str, spoken: str
    ) -> tuple[Any, ...]:
        if pressed != "channel-add":
            said, secret = await self._act_on_channel(pressed["channel-act"], pressed["channel"])
            return said, await self._channels(secret)
        body: dict[str, Any] = {"kind": kind, "url": url.strip(), "min_severity": severity, "language": spoken}
        body |= {"name": name.strip()} if name.strip() else {}
        body |= {"every_s": 60} if kind == "heartbeat" else {}
        secret = (await self._server.ask("POST", "/channels", body))["secret"] or ""
        return say("channel_added"), await self._channels(secret)

    async def _act_on_channel(self, act: str, channel: str) -> tuple[Any, str]:
        path = f"/channels/{quote(channel, safe='')}"
        if act == "remove":
            await self._server.ask("DELETE", path)
            return say("channel_removed"), ""
        made = await self._server.ask("POST", f"{path}/{act}")
        if act == "rotate":
            return say("channel_rotated"), str(made["secret"])
        if made.get("delivered"):
            return say("test_arrived"), ""
        why = made.get("error") or f"status {made.get('status')}"
        return note(say("test_failed", why=why), failed=True), ""

    # ---- keys

    async def _keys(self, secret: str = "") -> list[Component]:
        known = (await self._server.get("/keys"))["keys"]
        rows = [
            [
                html.B(one["name"] or one["id"]), one["scope"], one["project"] or say("all_projects"), _own_limits(one["limits"]),
                moment(one["created"]), or_never(ago, one["used"]), or_never(moment, one["expires"]),
                say("key_revoked") if one["revoked"] else small_button(say("key_revoke"), {"key": one["id"]}),
            ]
            for one in known
        ]  # fmt: skip
        scopes = {one: say(f"scope_{one}") for one in _SCOPES}
        form = form_row(
            select_field("key-scope", say("key_scope"), scopes, "operate", w=320),
            text_field("key-name", say("key_name")),
            text_field("key-project", say("key_project"), placeholder=say("all_projects")),
        )
        limits = (text_field(f"key-{one}", say(one), placeholder=say("limit_of_server"), w=180) for one in _LIMITS)
        heads = [say(f"key_{name}") for name in ("name", "scope", "project", "limits", "created", "used", "expires")]
        return [
            *_secret("key_secret", secret),
            table([*heads, ""], rows, empty=say("keys_none")),
            form,
            form_row(*limits),
            nothing(say("key_limits_how")),
            html.Div(dmc.Button(say("key_add"), id="key-add", size="sm")),
        ]

    async def _change_keys(self, pressed: Any, scope: str, name: str, project: str, *limits: str) -> tuple[Any, ...]:
        if pressed != "key-add":
            await self._server.ask("DELETE", f"/keys/{quote(pressed['key'], safe='')}")
            return say("key_gone"), await self._keys()
        own = {limit: text.strip() for limit, text in zip(_LIMITS, limits, strict=True) if text.strip()}
        body: dict[str, Any] = {"scope": scope, "name": name.strip(), "limits": own}
        body |= {"project": project.strip()} if project.strip() else {}
        made = await self._server.ask("POST", "/keys", body)
        return say("key_added"), await self._keys(made["key"])

    # ---- rules

    async def _rules(self, *, may_change: bool, project: str = "", unfolded: str = "") -> list[Component]:
        known = await self._server.get("/rules", project=project)
        items = [_rule_item(one, may_change=may_change) for one in known["rules"]]
        return [
            text_field(
                "rules-project", say("rules_project"), project, debounce=500, w=260, placeholder=say("all_projects")
            ),
            dcc.Store(id="rules-shown", data=project),
            html.Div(await self._own.section(project, may_change=may_change), id="own-alerts", className="stack"),
            html.H2(say("rules_of_server")),
            *([] if may_change else [nothing(say("may_not_set_rules"))]),
            *(nothing(say("rule_setting_ignored", why=one["why"])) for one in known["ignored"]),
            dmc.Accordion(items, multiple=True, value=[unfolded] if unfolded else [], className="card"),
        ]

    async def _change_rules(
        self, pressed: Any, project: str, shown: str, on: Sequence[bool], on_ids: Sequence[Any], values: Sequence[Any],
        value_ids: Sequence[Any],
    ) -> tuple[Any, ...]:  # fmt: skip
        project, rule = project.strip(), ""
        said: Any = no_update
        if pressed == "rules-project":
            if project == shown:  # the form has only just come into the page
                return no_update, no_update
        elif "rule-save" in pressed:
            rule = pressed["rule-save"]
            of_rule = [
                (which["threshold"], value)
                for value, which in zip(values, value_ids, strict=True)
                if which["of"] == rule
            ]
            enabled = next(bool(one) for one, which in zip(on, on_ids, strict=True) if which["rule-on"] == rule)
            body = {"enabled": enabled, "thresholds": filled(of_rule)}
            await self._server.ask("PUT", f"/rules/{rule}", body, query={"project": project})
            said = say("rule_saved")
        else:
            rule = pressed["rule-reset"]
            await self._server.ask("DELETE", f"/rules/{rule}", query={"project": project})
            said = say("rule_reset_done")
        may_change = may_in(await self._server.get("/session"), "admin", project)
        return said, await self._rules(may_change=may_change, project=project, unfolded=rule)

    # ---- prices and storage

    async def _prices(self, *, may_change: bool) -> list[Component]:
        known = (await self._server.get("/prices"))["prices"]
        rows = [
            [
                html.B(one["project"] or say("all_others")),
                *("" if one[name] is None else f"{one[name]:g} {one['currency']}" for name in _AMOUNTS),
                small_button(say("remove"), {"price": one["project"]}) if may_change else "",
            ]
            for one in known
        ]
        form = form_row(
            text_field("price-project", say("project"), placeholder=say("all_others")),
            *(number_field(f"price-{name}", say(f"price_{name}"), min=0, w=150) for name in _AMOUNTS),
            text_field("price-currency", say("price_currency"), "EUR", w=100),
            dmc.Button(say("price_set"), id="price-set", size="sm"),
        )
        heads = [say("project"), *(say(f"price_{name}") for name in _AMOUNTS), ""]
        return [table(heads, rows, empty=say("prices_none")), *([form] if may_change else [])]

    async def _change_prices(self, pressed: Any, project: str, currency: str, *amounts: Any) -> tuple[Any, ...]:
        if pressed != "price-set":
            await self._server.ask("DELETE", "/prices", query={"project": pressed["price"]})
            return say("price_removed"), await self._prices(may_change=True)
        body = {**filled(zip(_AMOUNTS, amounts, strict=True)), "currency": currency.strip()}
        await self._server.ask("PUT", "/prices", body, query={"project": project.strip()})
        return say("price_is_set"), await self._prices(may_change=True)

    async def _storage(self) -> list[Component]:
        about = await self._server.get("/self")
        storage, kept, most = about["storage"], about["retention_days"], about["max_bytes"]
        facts = []
        if storage:  # it tells of all projects, which not everybody may see
            facts += [(say(f"storage_{name}"), size(storage[f"{name}_bytes"])) for name in ("database", "free")]
        for name, days in kept.items():
            facts.append((say(f"kept_{name}"), say("for_ever") if days is None else say("days", count=days)))
        facts += [
            (say("storage_budget"), say("no_limit") if most is None else size(most)),
            (say("version"), about["version"]),
        ]
        return [
            html.Dl([html.Div([html.Dt(name), html.Dd(value)]) for name, value in facts], className="config card"),
            html.P(prose(say("storage_how")), className="hint"),
        ]


def _may_see(name: str, session: dict[str, Any]) -> bool:
    if name in ("channels", "users"):
        return may_in(session, "admin")
    return name not in ("keys", "audit") or "admin" in session["may"]


def _own_limits(limits: dict[str, Any]) -> Any:
    """A line each; what a key has not of its own it has of the server."""
    lines = [html.Div(f"{say(name)}: {_limit(name, number(limits[name]))}") for name in _LIMITS if name in limits]
    return html.Div(lines) if lines else say("limit_of_server")


def _limit(name: str, value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return say("no_limit")
    return size(value) if name == "bytes_per_s" else f"{value:,g}"


def _secret(title: str, secret: str) -> list[Component]:
    """Shown once; "": there is none."""
    copy = dcc.Clipboard(content=secret, className="copy", title=say("copy"))
    shown = dmc.Alert(html.Div([html.Code(secret), copy], className="secret"), title=say(title), color="yellow")
    return [shown] if secret else []


def _rule_item(rule: dict[str, Any], *, may_change: bool) -> Component:
    changed = rule["thresholds"] != rule["defaults"] or not rule["enabled"]
    told = rule["words"][language()]
    marks = [html.Span(say("rule_off"), className="bad")] if not rule["enabled"] else []
    marks += [html.Span(say("rule_changed"), className="quiet")] if changed and rule["enabled"] else []
    fields = [
        number_field(
            {"threshold": name, "of": rule["rule"]}, name.replace("_", " "), value, w=150, disabled=not may_change,
            description=say("rule_default", value=f"{rule['defaults'][name]:g}", unit=rule["units"].get(name, "")),
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
    panel = [
        html.P(told["meaning"]),
        html.P(told["fires"], className="quiet"),
        form_row(switch, *fields, *(buttons if may_change else [])),
    ]
    head = dmc.AccordionControl(html.Span([html.B(told["name"]), " ", *marks]))
    return dmc.AccordionItem([head, dmc.AccordionPanel(panel)], value=rule["rule"])
