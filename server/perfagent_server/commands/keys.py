"""`perfagent keys create|list|limit|revoke|login`: asks the running server; `create` also works while none runs."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

from perfagent.command_line.option_types import number_above
from perfagent.command_line.terminal_output import Screen, Table
from perfagent.errors import ConfigError, ServerUnreachable
from perfagent_server.commands.connection import AdminApi, add_options, no_server_is_meant
from perfagent_server.limits import LIMITS, Limits
from perfagent_server.security.keys import KEY_SCOPES

__all__ = ["command"]

_ID = "the eight characters in the middle of the key, as `keys list` shows them"


def command(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "API keys. ingest sends, read reads, operate also acknowledges, mutes, snoozes and silences, admin does everything. "
        "A key is shown once, when it is made."
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="create|list|limit|revoke|login")
    create = actions.add_parser("create", help="make a key and print it")
    create.add_argument("scope", choices=KEY_SCOPES)
    create.add_argument("--name", default="", help="what the key is for")
    create.add_argument("--project", help="the only project that the key sends to, sees and changes")
    create.add_argument(
        "--expires-days", type=number_above(0, 36500), metavar="N", help="refused after N days (default: never)"
    )
    create.add_argument(
        "--limit",
        dest="limits",
        metavar="NAME=NUMBER",
        action="append",
        default=[],
        help=f"a limit of its own, instead of the server's: {', '.join(LIMITS)}; inf is no limit",
    )
    create.set_defaults(run=_create)
    show = actions.add_parser("list", help="list keys, without their secrets")
    show.set_defaults(run=_list)
    limit = actions.add_parser("limit", help="change the limits of a key")
    limit.add_argument("id", help=_ID)
    limit.add_argument(
        "limits",
        metavar="NAME=NUMBER",
        nargs="*",
        help=f"override the server's limits (inf: unlimited): {', '.join(LIMITS)}; without arguments, reset to them",
    )
    limit.set_defaults(run=_limit)
    revoke = actions.add_parser("revoke", help="refuse a key from now on")
    revoke.add_argument("id", help=_ID)
    revoke.set_defaults(run=_revoke)
    login = actions.add_parser("login", help="print a new one-time address for a browser")
    login.set_defaults(run=_login)
    for action in (create, show, limit, revoke, login):
        add_options(action)


def _create(arguments: argparse.Namespace) -> int:
    body: dict[str, Any] = {"scope": arguments.scope, "name": arguments.name, "project": arguments.project}
    if arguments.expires_days is not None:
        body["expires_in_s"] = arguments.expires_days * 86400
    if arguments.limits:
        body["limits"] = _limits(arguments.limits)
    folder = None if arguments.data is None else arguments.data.expanduser()
    if no_server_is_meant(arguments):
        made = _create_offline(folder, body)
    else:
        try:
            made = AdminApi.from_arguments(arguments).request("POST", "/keys", body)
        except ServerUnreachable:
            if arguments.server is not None:
                raise
            made = _create_offline(folder, body)
    print(json.dumps(made) if arguments.json else made["key"])
    return 0


def _limits(texts: list[str]) -> dict[str, float]:
    """Of a key, by name. Raises ConfigError."""
    limits: dict[str, float] = {}
    for text in texts:
        name, _, number = text.partition("=")
        try:
            limits[name] = float(number)
        except ValueError:
            raise ConfigError(f"the limit is {text!r}; it must be NAME=NUMBER, such as requests_per_s=100") from None
    Limits().but(limits)
    return limits


def _create_offline(data: Path | None, body: dict[str, Any]) -> dict[str, Any]:
    """The first key for a server that refuses to start without one."""
    from perfagent_server.commands.server_lock import only_server
    from perfagent_server.database import open_database
    from perfagent_server.security.audit import record_of_command
    from perfagent_server.security.keys import PEPPER_FILE, Keys, secret_file
    from perfagent_server.settings import Settings

    settings = Settings.from_env(data=data)
    with only_server(settings):
        database = open_database(settings)
        try:
            keys = Keys(database, settings.key_pepper or secret_file(settings.data / PEPPER_FILE))
            expires = time.time() + body["expires_in_s"] if "expires_in_s" in body else None
            project, limits = body["project"], body.get("limits")
            audit = record_of_command("key.create", body["name"], body["scope"], project=project or "")
            key, token = keys.create(
                body["scope"], body["name"], project=project, expires=expires, limits=limits, also=audit
            )
        finally:
            database.close()
    return {"id": key.id, "scope": key.scope, "name": key.name, "project": key.project, "key": token}


def _list(arguments: argparse.Namespace) -> int:
    found = AdminApi.from_arguments(arguments).request("GET", "/keys")
    if arguments.json:
        print(json.dumps(found))
        return 0
    screen = Screen()
    if not found["keys"]:
        screen.line("no keys; `perfagent keys create ingest` makes one")
        return 0
    rows = [
        (
            key["id"], key["scope"], "revoked" if key["revoked"] else f"expires {key['expires']}" if key["expires"] else "valid",
            key["used"] or "never", key["project"] or "any", _limits_text(key["limits"]), key["name"],
        )
        for key in found["keys"]
    ]  # fmt: skip
    screen.table(Table(("ID", "SCOPE", "STATE", "LAST USED", "PROJECT", "LIMITS", "NAME"), rows, narrow=(4, 5, 6)))
    return 0


def _limit(arguments: argparse.Namespace) -> int:
    wanted = {"limits": _limits(arguments.limits)}
    key = AdminApi.from_arguments(arguments).request("PATCH", f"/keys/{quote(arguments.id, safe='')}", wanted)
    print(json.dumps(key) if arguments.json else f"limits of {key['id']}: {_limits_text(key['limits'])}")
    return 0


def _limits_text(limits: dict[str, Any]) -> str:
    return " ".join(f"{name}={float(number):.15g}" for name, number in limits.items()) or "the server's"


def _revoke(arguments: argparse.Namespace) -> int:
    AdminApi.from_arguments(arguments).request("DELETE", f"/keys/{quote(arguments.id, safe='')}")
    print(
        json.dumps({"id": arguments.id, "revoked": True})
        if arguments.json
        else f"{arguments.id} is refused from now on"
    )
    return 0


def _login(arguments: argparse.Namespace) -> int:
    made = AdminApi.from_arguments(arguments).request("POST", "/session/links")
    print(json.dumps(made) if arguments.json else made["url"])
    return 0
