"""The parts of the settings page that are about people: users, the audit log, and the viewer's own login."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

import dash_mantine_components as dmc
from dash import ALL, Dash, Input, Output, State, ctx, html, no_update
from dash.development.base_component import Component

from perfagent_dashboard import ids
from perfagent_dashboard.components.feedback import note, nothing
from perfagent_dashboard.components.tables import table
from perfagent_dashboard.components.times import ago, moment
from perfagent_dashboard.server_api import Problem, ServerApi
from perfagent_dashboard.words import say

__all__ = ["People"]

_ROLES = ("viewer", "operator", "admin")
_ENTRIES = 50  # of the audit log on a page


class People:
    def __init__(self, server: ServerApi) -> None:
        self._server = server

    def register(self, app: Dash) -> None:
        told = Output(ids.NOTES, "sendNotifications", allow_duplicate=True)
        app.callback(
            told, Output("settings-users", "children"),
            Input("user-add", "n_clicks"), Input({"user-act": ALL, "user": ALL}, "n_clicks"),
            State("user-name", "value"), State("user-password", "value"), State("user-role", "value"),
            State("user-project", "value"),
            prevent_initial_call=True,
        )(self._change_users)  # fmt: skip
        app.callback(
            told, Output("settings-account", "children"),
            Input("password-set", "n_clicks"), Input({"session": ALL}, "n_clicks"),
            State("password-old", "value"), State("password-new", "value"),
            prevent_initial_call=True,
        )(self._change_login)  # fmt: skip
        app.callback(
            Output("audit-entries", "children"),
            Input("audit-who", "value"), Input("audit-action", "value"), Input({"audit-before": ALL}, "n_clicks"),
            prevent_initial_call=True,
        )(self._page_of_audit)  # fmt: skip

    # ---- users

    async def users(self, *, may_change: bool) -> list[Component]:  # noqa: ARG002 - it is shown to who may
        known = (await self._server.get("/users"))["users"]
        rows = [
            [
                html.B(one["name"]), _roles(one["roles"]),
                html.Span(say("user_disabled"), className="bad") if one["disabled"] else say(f"login_{one['login']}"),
                ago(one["used"]) if one["used"] else say("never"),
                html.Div(
                    [_button(one, "enable" if one["disabled"] else "disable"), _button(one, "remove")], className="actions"
                ),
            ]
            for one in known
        ]  # fmt: skip
        roles = [{"value": one, "label": say(f"role_{one}")} for one in _ROLES]
        form = html.Div(
            [
                dmc.TextInput(id="user-name", label=say("user_name"), size="sm"),
                dmc.PasswordInput(
                    id="user-password", label=say("user_password"), size="sm", w=220, **{"aria-label": say("user_password")}
                ),
                dmc.Select(id="user-role", label=say("user_role"), data=roles, value="viewer", size="sm", allowDeselect=False),
                dmc.TextInput(id="user-project", label=say("user_project"), placeholder=say("all_projects"), size="sm"),
                dmc.Button(say("user_add"), id="user-add", size="sm"),
            ],
            className="form-row",
        )  # fmt: skip
        heads = [say(f"user_{name}") for name in ("name", "role", "login", "used")]
        return [table([*heads, ""], rows, empty=say("users_none")), form]

    async def _change_users(
        self, add: int | None, acts: Sequence[int | None], name: str, password: str, role: str, project: str
    ) -> Any:
        asked = ctx.triggered_id
        try:
            if asked == "user-add" and add:
                roles = [{"role": role, "project": (project or "").strip() or None}]
                body = {"name": (name or "").strip(), "password": password or "", "roles": roles}
                await self._server.ask("POST", "/users", body)
                said = say("user_added")
            elif isinstance(asked, dict) and any(acts):
                said = await self._act_on_user(asked["user-act"], asked["user"])
            else:
                return no_update, no_update
            return note(said), await self.users(may_change=True)
        except Problem as problem:
            return note(problem.message, failed=True), no_update

    async def _act_on_user(self, act: str, name: str) -> str:
        path = f"/users/{quote(name, safe='')}"
        if act == "remove":
            await self._server.ask("DELETE", path)
            return say("user_removed")
        await self._server.ask("PATCH", path, {"disabled": act == "disable"})
        return say("user_changed")

    # ---- the audit log

    async def audit(self, *, may_change: bool) -> list[Component]:  # noqa: ARG002
        filters = [
            dmc.TextInput(
                id=f"audit-{name}", label=say(f"audit_{name}"), placeholder=say(f"audit_filter_{name}"), debounce=400,
                size="sm", w=260,
            )
            for name in ("who", "action")
        ]  # fmt: skip
        return [html.Div(filters, className="form-row"), html.Div(await self._entries(), id="audit-entries")]

    async def _page_of_audit(self, who: str, action: str, _clicks: Sequence[int | None]) -> Any:
        asked = ctx.triggered_id
        before = asked["audit-before"] if isinstance(asked, dict) else 0
        try:
            return await self._entries((who or "").strip(), (action or "").strip(), before)
        except Problem as problem:
            return [nothing(problem.message)]

    async def _entries(self, who: str = "", action: str = "", before: int = 0) -> list[Component]:
        page = await self._server.get("/audit", who=who, action=action, before=before or None, limit=_ENTRIES)
        rows = [
            [
                moment(one["time"]), html.B(one["who"]), one["origin"], one["action"],
                _thing(one["thing"], one["project"]),
                one["detail"],
            ]
            for one in page["entries"]
        ]  # fmt: skip
        heads = [say(f"audit_{name}") for name in ("time", "who", "origin", "action", "thing", "detail")]
        turns = [(0, "audit_newest")] if before else []
        turns += [(page["next"], "audit_more")] if page["next"] else []
        buttons = [
            dmc.Button(say(word), id={"audit-before": at}, size="compact-sm", variant="default") for at, word in turns
        ]
        return [table(heads, rows, empty=say("audit_none")), html.Div(buttons, className="form-row")]

    # ---- one's own login

    async def account(self, session: dict[str, Any]) -> list[Component]:
        if not session["user"]:
            return [nothing(say("account_nobody" if session["who"] == "anyone" else "account_key"))]
        own = await self._server.get("/sessions")
        rows = [
            [
                moment(one["created"]), one["origin"], one["agent"],
                say("session_this") if one["current"] else dmc.Button(
                    say("session_end"), id={"session": one["id"]}, size="compact-sm", variant="default"
                ),
            ]
            for one in own["sessions"]
        ]  # fmt: skip
        heads = [say(f"session_{name}") for name in ("opened", "origin", "agent")]
        return [
            html.P(say("account_who", name=session["name"])),
            _password_form() if own["login"] == "password" else html.P(say("password_at_provider")),
            html.H2(say("own_sessions")),
            table([*heads, ""], rows, empty=""),
        ]

    async def _change_login(self, change: int | None, ends: Sequence[int | None], old: str, new: str) -> Any:
        asked = ctx.triggered_id
        try:
            if asked == "password-set" and change:
                await self._server.ask("POST", "/session/password", {"old": old or "", "password": new or ""})
                said = say("password_is_set")
            elif isinstance(asked, dict) and any(ends):
                await self._server.ask("DELETE", f"/sessions/{quote(asked['session'], safe='')}")
                said = say("session_ended")
            else:
                return no_update, no_update
            return note(said), await self.account(await self._server.get("/session"))
        except Problem as problem:
            return note(problem.message, failed=True), no_update


def _password_form() -> Component:
    fields = [
        dmc.PasswordInput(id=f"password-{name}", label=say(f"password_{name}"), size="sm", w=220)
        for name in ("old", "new")
    ]
    button = dmc.Button(say("password_set"), id="password-set", size="sm")
    return html.Div([*fields, button], className="form-row")


def _roles(roles: Sequence[dict[str, Any]]) -> str:
    told = [say("role_in", role=one["role"], project=one["project"] or say("all_projects").lower()) for one in roles]
    return ", ".join(told) or say("no_role")


def _thing(thing: str, project: str) -> Any:
    """A price's thing is its project: it is named once."""
    if not thing or not project or project == thing:
        return html.Code(thing) if thing else project
    return html.Span([html.Code(thing), " ", say("thing_in", project=project)])


def _button(user: dict[str, Any], act: str) -> Component:
    ident = {"user-act": act, "user": user["name"]}
    return dmc.Button(say(f"user_{act}"), id=ident, size="compact-sm", variant="default")
