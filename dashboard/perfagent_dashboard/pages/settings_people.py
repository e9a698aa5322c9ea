"""The parts of the settings page that are about people: users, the audit log, and the viewer's own login."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

import dash_mantine_components as dmc
from dash import ALL, Dash, Input, Output, ctx, html
from dash.development.base_component import Component

from perfagent_dashboard.components.feedback import nothing
from perfagent_dashboard.components.fields import form_row, select_field, small_button, text_field
from perfagent_dashboard.components.tables import table
from perfagent_dashboard.components.times import ago, moment, or_never
from perfagent_dashboard.pages.buttons import on_press
from perfagent_dashboard.server_api import Problem, ServerApi
from perfagent_dashboard.words import say

__all__ = ["People"]

_ROLES = ("viewer", "operator", "admin")
_ENTRIES = 50  # of the audit log on a page


class People:
    def __init__(self, server: ServerApi) -> None:
        self._server = server

    def register(self, app: Dash) -> None:
        on_press(
            app, [Output("settings-users", "children")], ["user-add", {"user-act": ALL, "user": ALL}],
            [f"user-{name}" for name in ("name", "password", "role", "project")], self._change_users,
        )  # fmt: skip
        on_press(
            app, [Output("settings-account", "children")], ["password-set", {"session": ALL}], ["password-old", "password-new"],
            self._change_login,
        )  # fmt: skip
        app.callback(
            Output("audit-entries", "children"),
            Input("audit-who", "value"), Input("audit-action", "value"), Input({"audit-before": ALL}, "n_clicks"),
            prevent_initial_call=True,
        )(self._page_of_audit)  # fmt: skip

    # ---- users

    async def users(self) -> list[Component]:
        known = (await self._server.get("/users"))["users"]
        rows = [
            [
                html.B(one["name"]), _roles(one["roles"]),
                html.Span(say("user_disabled"), className="bad") if one["disabled"] else say(f"login_{one['login']}"),
                or_never(ago, one["used"]),
                html.Div(
                    [
                        small_button(say(f"user_{act}"), {"user-act": act, "user": one["name"]})
                        for act in ("enable" if one["disabled"] else "disable", "remove")
                    ],
                    className="actions",
                ),
            ]
            for one in known
        ]  # fmt: skip
        form = form_row(
            text_field("user-name", say("user_name")),
            _password("user-password", say("user_password")),
            select_field("user-role", say("user_role"), {one: say(f"role_{one}") for one in _ROLES}, "viewer"),
            text_field("user-project", say("user_project"), placeholder=say("all_projects")),
            dmc.Button(say("user_add"), id="user-add", size="sm"),
        )
        heads = [say(f"user_{name}") for name in ("name", "role", "login", "used")]
        return [table([*heads, ""], rows, empty=say("users_none")), form]

    async def _change_users(self, pressed: Any, name: str, password: str, role: str, project: str) -> tuple[Any, ...]:
        if pressed == "user-add":
            roles = [{"role": role, "project": project.strip() or None}]
            await self._server.ask("POST", "/users", {"name": name.strip(), "password": password, "roles": roles})
            return say("user_added"), await self.users()
        act, path = pressed["user-act"], f"/users/{quote(pressed['user'], safe='')}"
        if act == "remove":
            await self._server.ask("DELETE", path)
            return say("user_removed"), await self.users()
        await self._server.ask("PATCH", path, {"disabled": act == "disable"})
        return say("user_changed"), await self.users()

    # ---- the audit log

    async def audit(self) -> list[Component]:
        filters = [
            text_field(f"audit-{one}", say(f"audit_{one}"), placeholder=say(f"audit_filter_{one}"), debounce=400, w=260)
            for one in ("who", "action")
        ]
        return [form_row(*filters), html.Div(await self._entries(), id="audit-entries")]

    async def _page_of_audit(self, who: str, action: str, _clicks: Sequence[int | None]) -> Any:
        asked = ctx.triggered_id
        before = asked["audit-before"] if isinstance(asked, dict) else 0
        try:
            return await self._entries(who.strip(), action.strip(), before)
        except Problem as problem:
            return [nothing(problem.message)]

    async def _entries(self, who: str = "", action: str = "", before: int = 0) -> list[Component]:
        page = await self._server.get("/audit", who=who, action=action, before=before or None, limit=_ENTRIES)
        rows = [
            [
                moment(one["time"]), html.B(one["who"]), one["origin"], one["action"], _thing(one["thing"], one["project"]),
                one["detail"],
            ]
            for one in page["entries"]
        ]  # fmt: skip
        heads = [say(f"audit_{name}") for name in ("time", "who", "origin", "action", "thing", "detail")]
        turns = [(0, "audit_newest")] if before else []
        turns += [(page["next"], "audit_more")] if page["next"] else []
        buttons = [small_button(say(word), {"audit-before": at}) for at, word in turns]
        return [table(heads, rows, empty=say("audit_none")), form_row(*buttons)]

    # ---- one's own login

    async def account(self, session: dict[str, Any]) -> list[Component]:
        if not session["user"]:
            return [nothing(say("account_nobody" if session["who"] == "anyone" else "account_key"))]
        own = await self._server.get("/sessions")
        rows = [
            [
                moment(one["created"]), one["origin"], one["agent"],
                say("session_this") if one["current"] else small_button(say("session_end"), {"session": one["id"]}),
            ]
            for one in own["sessions"]
        ]  # fmt: skip
        heads = [say(f"session_{name}") for name in ("opened", "origin", "agent")]
        form = form_row(
            *(_password(f"password-{name}", say(f"password_{name}")) for name in ("old", "new")),
            dmc.Button(say("password_set"), id="password-set", size="sm"),
        )
        return [
            html.P(say("account_who", name=session["name"])),
            form if own["login"] == "password" else html.P(say("password_at_provider")),
            html.H2(say("own_sessions")),
            table([*heads, ""], rows, empty=""),
        ]

    async def _change_login(self, pressed: Any, old: str, new: str) -> tuple[Any, ...]:
        if pressed == "password-set":
            await self._server.ask("POST", "/session/password", {"old": old, "password": new})
            said = say("password_is_set")
        else:
            await self._server.ask("DELETE", f"/sessions/{quote(pressed['session'], safe='')}")
            said = say("session_ended")
        return said, await self.account(await self._server.get("/session"))


def _password(ident: str, label: str) -> Component:
    return dmc.PasswordInput(id=ident, label=label, value="", size="sm", w=220, **{"aria-label": label})


def _roles(roles: Sequence[dict[str, Any]]) -> str:
    told = [say("role_in", role=one["role"], project=one["project"] or say("all_projects").lower()) for one in roles]
    return ", ".join(told) or say("no_role")


def _thing(thing: str, project: str) -> Any:
    """A price's thing is its project: it is named once."""
    if not thing or not project or project == thing:
        return html.Code(thing) if thing else project
    return html.Span([html.Code(thing), " ", say("thing_in", project=project)])
