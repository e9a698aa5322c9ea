"""`perfagent users add|list|role|password|disable|enable|remove`: asks the running server; `add` also works while none
runs."""

from __future__ import annotations

import argparse
import getpass
import json
import sys
from pathlib import Path
from typing import Any
from urllib.parse import quote

from perfagent.command_line.terminal_output import Screen, Table
from perfagent.errors import ConfigError, ServerUnreachable
from perfagent_server.commands.connection import AdminApi, add_options, no_server_is_meant
from perfagent_server.security.rights import ROLES

__all__ = ["command"]


def command(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Users, who log in by name. viewer reads, operator also acts (acknowledges, silences, tags, profiles), admin also "
        "manages (keys, users, channels, rules, prices, deleting); in all projects, or in some."
    )
    actions = parser.add_subparsers(
        dest="action", required=True, metavar="add|list|role|password|disable|enable|remove"
    )
    add = actions.add_parser("add", help="add a user; asks for a password")
    _add_name(add)
    add.add_argument("--role", choices=ROLES, default="viewer", help="default: viewer")
    _add_projects(add)
    _add_password(add)
    add.set_defaults(run=_add)
    show = actions.add_parser("list", help="list users and their roles")
    show.set_defaults(run=_list)
    role = actions.add_parser("role", help="give a user a role, or take it with `none`")
    _add_name(role)
    role.add_argument("role", choices=[*ROLES, "none"])
    _add_projects(role)
    role.set_defaults(run=_role)
    password = actions.add_parser("password", help="set a user's password; it ends the user's sessions")
    _add_name(password)
    _add_password(password)
    password.set_defaults(run=_password)
    for name, said in (
        ("disable", "refuse a user and end the user's sessions"), ("enable", "let a disabled user in again"),
    ):  # fmt: skip
        switch = actions.add_parser(name, help=said)
        _add_name(switch)
        switch.set_defaults(run=_switch)
    remove = actions.add_parser("remove", help="remove a user and end the user's sessions")
    _add_name(remove)
    remove.set_defaults(run=_remove)
    for action in set(actions.choices.values()):
        add_options(action)


def _add_name(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="as the user logs in")


def _add_projects(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--project", action="append", metavar="PROJECT", help="in this project only; may be repeated (default: in all)"
    )


def _add_password(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--password-stdin", action="store_true", help="read the password from standard input")


def _add(arguments: argparse.Namespace) -> int:
    password = _asked_password(arguments)
    roles = [{"role": arguments.role, "project": project} for project in arguments.project or [None]]
    body: dict[str, Any] = {"name": arguments.name, "password": password, "roles": roles}
    folder = None if arguments.data is None else arguments.data.expanduser()
    if no_server_is_meant(arguments):
        made = _add_offline(folder, body)
    else:
        try:
            made = AdminApi.from_arguments(arguments).request("POST", "/users", body)
        except ServerUnreachable:
            if arguments.server is not None:
                raise
            made = _add_offline(folder, body)
    return _told(arguments, made, f"{made['name']} may log in: {_roles(made)}")


def _add_offline(data: Path | None, body: dict[str, Any]) -> dict[str, Any]:
    """The first user of a server that does not run yet."""
    from perfagent_server.commands.server_lock import only_server
    from perfagent_server.database import open_database
    from perfagent_server.security.accounts import Accounts, NameTaken, why_no_name
    from perfagent_server.security.audit import record_of_command
    from perfagent_server.security.passwords import Passwords, why_not
    from perfagent_server.settings import Settings

    for why in (why_no_name(body["name"].strip()), why_not(body["password"])):
        if why is not None:
            raise ConfigError(why)
    settings = Settings.from_env(data=data)
    with only_server(settings):
        database = open_database(settings)
        try:
            roles = [(one["project"], one["role"]) for one in body["roles"]]
            audit = record_of_command("user.add", body["name"].strip(), _roles(body))
            Accounts(database).add(body["name"], Passwords().hash(body["password"]), roles, also=audit)
        except NameTaken:
            raise ConfigError(f"there is a user {body['name']!r} already") from None
        finally:
            database.close()
    return {"name": body["name"], "roles": body["roles"]}


def _list(arguments: argparse.Namespace) -> int:
    found = AdminApi.from_arguments(arguments).request("GET", "/users")
    if arguments.json:
        print(json.dumps(found))
        return 0
    screen = Screen()
    if not found["users"]:
        screen.line("no users; `perfagent users add NAME` adds one")
        return 0
    rows = [
        (one["name"], _roles(one), "disabled" if one["disabled"] else one["login"], one["used"] or "never")
        for one in found["users"]
    ]
    screen.table(Table(("NAME", "ROLES", "LOGIN", "LAST LOGIN"), rows, narrow=(1,)))
    return 0


def _role(arguments: argparse.Namespace) -> int:
    """Changes the role in these projects (or in all); those in others stay."""
    api = AdminApi.from_arguments(arguments)
    known = next((one for one in api.request("GET", "/users")["users"] if _same(one["name"], arguments.name)), None)
    if known is None:
        raise ConfigError(f"there is no user {arguments.name!r}; `perfagent users list` lists them")
    changed = arguments.project or [None]
    roles = [one for one in known["roles"] if one["project"] not in changed]
    if arguments.role != "none":
        roles += [{"role": arguments.role, "project": project} for project in changed]
    made = api.request("PATCH", _path(arguments), {"roles": roles})
    return _told(arguments, made, f"{made['name']}: {_roles(made)}")


def _password(arguments: argparse.Namespace) -> int:
    made = AdminApi.from_arguments(arguments).request(
        "PATCH", _path(arguments), {"password": _asked_password(arguments)}
    )
    return _told(arguments, made, f"{made['name']} has a new password, and is logged out everywhere")


def _switch(arguments: argparse.Namespace) -> int:
    disabled = arguments.action == "disable"
    made = AdminApi.from_arguments(arguments).request("PATCH", _path(arguments), {"disabled": disabled})
    return _told(arguments, made, f"{made['name']} is {'refused from now on' if disabled else 'let in again'}")


def _remove(arguments: argparse.Namespace) -> int:
    AdminApi.from_arguments(arguments).request("DELETE", _path(arguments))
    return _told(arguments, {"name": arguments.name, "removed": True}, f"{arguments.name} is removed")


def _path(arguments: argparse.Namespace) -> str:
    return f"/users/{quote(arguments.name, safe='')}"


def _same(name: str, other: str) -> bool:
    return name.casefold() == other.strip().casefold()


def _roles(user: dict[str, Any]) -> str:
    return ", ".join(f"{one['role']} of {one['project'] or 'all projects'}" for one in user["roles"]) or "no role"


def _told(arguments: argparse.Namespace, made: dict[str, Any], said: str) -> int:
    print(json.dumps(made) if arguments.json else said)
    return 0


def _asked_password(arguments: argparse.Namespace) -> str:
    """From standard input, or typed twice at the terminal."""
    if arguments.password_stdin:
        return sys.stdin.readline().rstrip("\r\n")
    if not sys.stdin.isatty():
        raise ConfigError("no terminal to ask for a password at; give it with --password-stdin")
    first = getpass.getpass("Password: ")
    if getpass.getpass("The same again: ") != first:
        raise ConfigError("these two passwords differ; nothing was changed")
    return first
