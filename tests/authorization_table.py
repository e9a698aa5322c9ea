"""Who may use which route: the decision of people, against which tests/server/security holds the server, and from which
`scripts/authorization` writes docs/reference/authorization.md."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from fastapi.routing import APIRoute
from starlette.routing import BaseRoute, WebSocketRoute

from perfagent_server.security.rights import NO_RIGHTS, Rights, Scope, rights_of_roles, rights_of_scope

__all__ = ["CALLERS", "OURS", "PAGES", "TABLE", "THEIRS", "UNKNOWN", "Caller", "Need", "declared", "expected", "flat"]

OURS, THEIRS = "ours", "theirs"
"""Projects: what the routes are asked about is of `ours`."""


@dataclass(frozen=True)
class Need:
    """scope: None is open to everybody. on: what the route works on. "server": needs the scope in all projects. "seen": all
    that the caller may see. "run", "alert", "silence", "key": one thing, in its project. "project": one project, that the
    request names. "user": the caller's own login."""

    scope: Scope | None
    on: Literal["server", "seen", "run", "alert", "silence", "key", "project", "user"]


OPEN = Need(None, "server")
READ_RUN, READ_SEEN = Need("read", "run"), Need("read", "seen")
OPERATE_ALERT = Need("operate", "alert")
ADMIN_SERVER, ADMIN_PROJECT = Need("admin", "server"), Need("admin", "project")
OWN = Need(None, "user")

TABLE: dict[tuple[str, str], Need] = {
    ("POST", "/api/v1/ingest"): Need("ingest", "project"),
    ("POST", "/api/v1/log"): Need("ingest", "project"),
    ("GET", "/api/v1/runs"): READ_SEEN,
    ("GET", "/api/v1/runs/{run}"): READ_RUN,
    ("PATCH", "/api/v1/runs/{run}"): Need("operate", "run"),
    ("DELETE", "/api/v1/runs/{run}"): Need("admin", "run"),
    ("GET", "/api/v1/runs/{run}/latest"): READ_RUN,
    ("GET", "/api/v1/runs/{run}/names"): READ_RUN,
    ("GET", "/api/v1/runs/{run}/events"): READ_RUN,
    ("GET", "/api/v1/runs/{run}/series"): READ_RUN,
    ("GET", "/api/v1/runs/{run}/timing"): READ_RUN,
    ("GET", "/api/v1/timing"): READ_SEEN,
    ("GET", "/api/v1/series"): READ_SEEN,
    ("GET", "/api/v1/runs/{run}/ranks"): READ_RUN,
    ("GET", "/api/v1/runs/{run}/layers"): READ_RUN,
    ("GET", "/api/v1/runs/{run}/export"): READ_RUN,
    ("GET", "/api/v1/runs/{run}/verdict"): READ_RUN,
    ("GET", "/api/v1/runs/{run}/findings"): READ_RUN,
    ("GET", "/api/v1/runs/{run}/alerts"): READ_RUN,
    ("POST", "/api/v1/runs/{run}/commands"): Need("operate", "run"),
    ("GET", "/api/v1/runs/{run}/commands"): READ_RUN,
    ("GET", "/api/v1/runs/{run}/media"): READ_RUN,
    ("GET", "/api/v1/runs/{run}/media/histograms"): READ_RUN,
    ("GET", "/api/v1/runs/{run}/media/{media}"): READ_RUN,
    ("GET", "/api/v1/runs/{run}/profiles"): READ_RUN,
    ("GET", "/api/v1/runs/{run}/profiles/{profile}"): READ_RUN,
    ("GET", "/api/v1/runs/{run}/profiles/{profile}/operators"): READ_RUN,
    ("GET", "/api/v1/runs/{run}/profiles/{profile}/flame"): READ_RUN,
    ("GET", "/api/v1/runs/{run}/stacks"): READ_RUN,
    ("GET", "/api/v1/runs/{run}/annotations"): READ_RUN,
    ("POST", "/api/v1/runs/{run}/annotations"): Need("operate", "run"),
    ("DELETE", "/api/v1/runs/{run}/annotations/{annotation}"): Need("operate", "run"),
    ("GET", "/api/v1/panels"): Need("read", "project"),
    ("PUT", "/api/v1/panels/{panel}"): Need("operate", "project"),
    ("DELETE", "/api/v1/panels/{panel}"): Need("operate", "project"),
    ("GET", "/api/v1/compare"): READ_RUN,
    ("PUT", "/api/v1/imports/{import_id}"): Need("ingest", "project"),
    ("POST", "/api/v1/imports/known"): Need("ingest", "seen"),
    ("GET", "/api/v1/imports"): READ_SEEN,
    ("DELETE", "/api/v1/imports/{import_id}"): Need("admin", "project"),
    ("GET", "/api/v1/groups"): READ_SEEN,
    ("GET", "/api/v1/groups/series"): READ_SEEN,
    ("GET", "/api/v1/groups/runs"): READ_SEEN,
    ("GET", "/api/v1/views"): Need("read", "project"),
    ("PUT", "/api/v1/views/{name}"): Need("operate", "project"),
    ("DELETE", "/api/v1/views/{name}"): Need("operate", "project"),
    ("GET", "/api/v1/alerts"): READ_SEEN,
    ("GET", "/api/v1/alerts/inbox"): READ_SEEN,
    ("POST", "/api/v1/alerts/ack"): OPERATE_ALERT,
    ("POST", "/api/v1/alerts/unack"): OPERATE_ALERT,
    ("GET", "/api/v1/alerts/{alert_id}"): Need("read", "alert"),
    ("POST", "/api/v1/alerts/{alert_id}/ack"): OPERATE_ALERT,
    ("POST", "/api/v1/alerts/{alert_id}/unack"): OPERATE_ALERT,
    ("POST", "/api/v1/alerts/{alert_id}/mute"): OPERATE_ALERT,
    ("POST", "/api/v1/alerts/{alert_id}/unmute"): OPERATE_ALERT,
    ("POST", "/api/v1/alerts/{alert_id}/snooze"): OPERATE_ALERT,
    ("POST", "/api/v1/alerts/{alert_id}/unsnooze"): OPERATE_ALERT,
    ("POST", "/api/v1/alerts/{alert_id}/resolve"): OPERATE_ALERT,
    ("GET", "/api/v1/silences"): READ_SEEN,
    ("POST", "/api/v1/silences"): Need("operate", "project"),
    ("DELETE", "/api/v1/silences/{silence_id}"): Need("operate", "silence"),
    ("GET", "/api/v1/channels"): ADMIN_SERVER,
    ("POST", "/api/v1/channels"): ADMIN_SERVER,
    ("PATCH", "/api/v1/channels/{channel_id}"): ADMIN_SERVER,
    ("DELETE", "/api/v1/channels/{channel_id}"): ADMIN_SERVER,
    ("POST", "/api/v1/channels/{channel_id}/rotate"): ADMIN_SERVER,
    ("POST", "/api/v1/channels/{channel_id}/test"): ADMIN_SERVER,
    ("GET", "/api/v1/deliveries"): READ_SEEN,
    ("GET", "/api/v1/rules"): Need("read", "project"),
    ("PUT", "/api/v1/rules/{rule}"): ADMIN_PROJECT,
    ("DELETE", "/api/v1/rules/{rule}"): ADMIN_PROJECT,
    ("GET", "/api/v1/rules/alerts"): Need("read", "project"),
    ("POST", "/api/v1/rules/alerts"): ADMIN_PROJECT,
    ("PUT", "/api/v1/rules/alerts/{name}"): ADMIN_PROJECT,
    ("DELETE", "/api/v1/rules/alerts/{name}"): ADMIN_PROJECT,
    ("POST", "/api/v1/rules/alerts/try"): ADMIN_PROJECT,
    ("GET", "/api/v1/prices"): READ_SEEN,
    ("PUT", "/api/v1/prices"): ADMIN_PROJECT,
    ("DELETE", "/api/v1/prices"): ADMIN_PROJECT,
    ("GET", "/api/v1/retention"): READ_SEEN,
    ("GET", "/api/v1/retention/preview"): Need("read", "server"),
    ("PUT", "/api/v1/retention"): ADMIN_PROJECT,
    ("PATCH", "/api/v1/retention"): ADMIN_PROJECT,
    ("DELETE", "/api/v1/retention"): ADMIN_PROJECT,
    ("GET", "/api/v1/keys"): Need("admin", "seen"),
    ("POST", "/api/v1/keys"): ADMIN_PROJECT,
    ("PATCH", "/api/v1/keys/{key_id}"): Need("admin", "key"),
    ("DELETE", "/api/v1/keys/{key_id}"): Need("admin", "key"),
    ("GET", "/api/v1/users"): ADMIN_SERVER,
    ("POST", "/api/v1/users"): ADMIN_SERVER,
    ("PATCH", "/api/v1/users/{name}"): ADMIN_SERVER,
    ("DELETE", "/api/v1/users/{name}"): ADMIN_SERVER,
    ("GET", "/api/v1/session"): OPEN,
    ("DELETE", "/api/v1/session"): OPEN,
    ("GET", "/api/v1/sessions"): OWN,
    ("DELETE", "/api/v1/sessions/{session_id}"): OWN,
    ("POST", "/api/v1/session/password"): OWN,
    ("POST", "/api/v1/session/links"): ADMIN_SERVER,
    ("GET", "/api/v1/audit"): Need("admin", "seen"),
    ("GET", "/api/v1/self"): READ_SEEN,
    ("GET", "/healthz"): OPEN,
    ("GET", "/livez"): OPEN,
    ("GET", "/readyz"): OPEN,
    ("GET", "/metrics"): Need("read", "server"),
    ("GET", "/openapi.json"): OPEN,
    ("GET", "/docs"): OPEN,
    ("GET", "/docs/{name}"): OPEN,
    ("GET", "/login"): OPEN,
    ("POST", "/login"): OPEN,
    ("GET", "/login/oidc"): OPEN,
    ("GET", "/login/oidc/callback"): OPEN,
    ("WEBSOCKET", "/ws/live"): READ_SEEN,
}
UNKNOWN = ("/api", "/api/{rest:path}")  # answer 404 to everybody
PAGES = ("/",)  # behind the page gate; see test_login.py


def flat(routes: list[BaseRoute], prefix: str = "") -> Iterator[tuple[str, str, BaseRoute]]:
    """(method, path, route) of every route, also inside included routers."""
    for route in routes:
        inner = getattr(route, "original_router", None)
        if inner is not None:
            yield from flat(inner.routes, prefix + route.include_context.prefix)  # type: ignore[attr-defined]
        elif isinstance(route, APIRoute):
            yield from ((method, prefix + route.path, route) for method in route.methods)
        elif isinstance(route, WebSocketRoute) or type(route).__name__ == "APIWebSocketRoute":
            yield "WEBSOCKET", prefix + route.path, route  # type: ignore[attr-defined]
        else:
            raise AssertionError(f"a kind of route that this table does not know: {route!r}")


def declared(route: BaseRoute) -> set[str]:
    """The scopes that a route asks for before its own code runs, as `admin` or `admin everywhere`."""

    def names(dependant: object) -> Iterator[str]:
        for one in dependant.dependencies:  # type: ignore[attr-defined]
            name = getattr(one.call, "__name__", "")
            if name.startswith("require_"):
                yield name.removeprefix("require_").replace("_", " ")
            yield from names(one)

    return set(names(route.dependant)) if isinstance(route, APIRoute) else set()


@dataclass(frozen=True)
class Caller:
    """kind: key (with its scope), user (who is logged in), "bad key" (presented, and refused), or nobody."""

    name: str
    rights: Rights
    kind: Literal["nobody", "key", "bad key", "user"]


def _key(scope: str, project: str | None = None) -> Caller:
    where = "" if project is None else f" of {'this' if project == OURS else 'another'} project"
    return Caller(f"{scope} key{where}", rights_of_scope(scope, project), "key")


def _user(role: str, project: str | None = None) -> Caller:
    where = "" if project is None else f" of {'this' if project == OURS else 'another'} project"
    return Caller(f"{role}{where}", rights_of_roles([(project, role)]), "user")


CALLERS = [
    Caller("nobody", NO_RIGHTS, "nobody"),
    *(_key(scope) for scope in ("ingest", "read", "operate", "admin")),
    *(_key(scope, OURS) for scope in ("ingest", "read", "admin")),
    *(_key(scope, THEIRS) for scope in ("ingest", "read", "admin")),
    Caller("revoked key", NO_RIGHTS, "bad key"),
    Caller("expired key", NO_RIGHTS, "bad key"),
    *(_user(role) for role in ("viewer", "operator", "admin")),
    *(_user(role, OURS) for role in ("viewer", "operator", "admin")),
    *(_user(role, THEIRS) for role in ("viewer", "operator", "admin")),
    Caller("disabled user", NO_RIGHTS, "nobody"),
    Caller("removed user", NO_RIGHTS, "nobody"),
    Caller("user without a role", NO_RIGHTS, "user"),
]

Outcome = Literal["yes", "no", "hidden"]
"""hidden: 404, as if it were not there."""
OPEN_ACCESS = Rights(frozenset({"read", "ingest", "operate"}))
"""Those of nobody in particular on a loopback where no key is needed."""


def expected(need: Need, caller: Caller, *, open_access: bool = False) -> Outcome:
    """What a caller gets who asks about something of the project `ours`."""
    if need.on == "user":
        return "yes" if caller.kind == "user" else "no"
    if need.scope is None:
        return "yes"
    rights = OPEN_ACCESS if open_access and caller.kind == "nobody" else caller.rights
    if need.on == "server":
        return "yes" if need.scope in rights.everywhere else "no"
    if need.scope not in rights.scopes:
        return "no"
    if need.on == "seen" or rights.may(need.scope, OURS):
        return "yes"
    if need.scope == "ingest" or rights.may("read", OURS):
        return "no"  # sending to another project is refused as such: nothing is shown by it
    return "hidden"
