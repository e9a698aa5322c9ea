"""`perfagent channels add|set|list|test|log|rotate|remove`: who receives alerts. Asks the running server."""

from __future__ import annotations

import argparse
import json
from typing import Any
from urllib.parse import quote

from perfagent.command_line.option_types import seconds
from perfagent.command_line.terminal_output import Screen, Table
from perfagent.errors import ConfigError
from perfagent_server.alerts.kinds import KINDS
from perfagent_server.commands.connection import AdminApi, add_options
from perfagent_server.rules.texts import LANGUAGES

__all__ = ["command"]


def command(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Channels receive alerts. A webhook's secret is shown once, when it is added; receivers verify with it."
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="add|set|list|test|log|rotate|remove")
    add = actions.add_parser("add", help="add a channel, and print a webhook's secret")
    add.add_argument("kind", choices=KINDS)
    add.add_argument("url", metavar="URL", help="where to send: the address as the service shows it")
    _add_settings(add)
    add.set_defaults(run=_add)
    change = actions.add_parser("set", help="change a channel; what is not given stays")
    _add_id(change)
    change.add_argument("--url", metavar="URL", help="where to send from now on")
    _add_settings(change)
    change.add_argument("--enabled", choices=("yes", "no"), help="no: nothing is sent there")
    change.set_defaults(run=_set)
    show = actions.add_parser("list", help="list channels, without their secrets")
    show.set_defaults(run=_list)
    test = actions.add_parser("test", help="send a test and say whether it arrived")
    test.set_defaults(run=_test)
    log = actions.add_parser("log", help="list what was sent to a channel, or is waiting")
    log.set_defaults(run=_log)
    rotate = actions.add_parser("rotate", help="print a new secret; the old one signs beside it for a day")
    rotate.set_defaults(run=_rotate)
    remove = actions.add_parser("remove", help="remove a channel")
    remove.set_defaults(run=_remove)
    for action in (test, log, rotate, remove):
        _add_id(action)
    for action in (add, change, show, test, log, rotate, remove):
        add_options(action)


def _add_id(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("id", help="the channel's id, as `channels list` shows it")


def _add_settings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--name", help="what to call it (default: its URL)")
    parser.add_argument(
        "--min-severity",
        choices=("info", "warning", "critical"),
        help="the lowest severity that is sent (default: warning)",
    )
    parser.add_argument(
        "--project",
        dest="projects",
        action="append",
        metavar="NAME",
        help="only runs of this project; give it again for another, or empty for any",
    )
    parser.add_argument(
        "--tag",
        dest="tags",
        action="append",
        metavar="TAG",
        help="only runs with this tag; give it again for another, or empty for any",
    )
    parser.add_argument(
        "--group-s", type=seconds, metavar="S",
        help="at most one message about a run in S seconds, apart from critical alerts (default: 600 for chats and mail)",
    )  # fmt: skip
    parser.add_argument(
        "--repeat-s", type=seconds, metavar="S", help="tell what still fires again after S seconds (default: never)"
    )
    parser.add_argument(
        "--summaries", action=argparse.BooleanOptionalAction, help="also tell what became of a run that ended"
    )
    parser.add_argument(
        "--every-s", type=seconds, metavar="S", help="send a digest every S seconds; a heartbeat needs it"
    )
    parser.add_argument("--language", choices=tuple(LANGUAGES), help="of its messages (default: en)")


def _settings(arguments: argparse.Namespace) -> dict[str, Any]:
    names = ("name", "min_severity", "projects", "tags", "group_s", "repeat_s", "summaries", "every_s", "language")
    given = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    lists = {name: [one for one in given[name] if one] for name in ("projects", "tags") if name in given}
    return given | lists


def _add(arguments: argparse.Namespace) -> int:
    body = {"kind": arguments.kind, "url": arguments.url, **_settings(arguments)}
    made = AdminApi.from_arguments(arguments).request("POST", "/channels", body)
    if arguments.json:
        print(json.dumps(made))
    else:
        print(f"channel  {made['id']}" + (f"\nsecret   {made['secret']}" if made["secret"] else ""))
    return 0


def _set(arguments: argparse.Namespace) -> int:
    body = _settings(arguments)
    if arguments.url is not None:
        body["url"] = arguments.url
    if arguments.enabled is not None:
        body["enabled"] = arguments.enabled == "yes"
    if not body:
        raise ConfigError("nothing to change; name an option, such as --min-severity critical")
    changed = AdminApi.from_arguments(arguments).request("PATCH", _path(arguments), body)
    print(json.dumps(changed) if arguments.json else f"{arguments.id} is changed")
    return 0


def _log(arguments: argparse.Namespace) -> int:
    path = f"/deliveries?channel={quote(arguments.id, safe='')}&limit=100"
    found = AdminApi.from_arguments(arguments).request("GET", path)
    if arguments.json:
        print(json.dumps(found))
        return 0
    screen = Screen()
    if not found["deliveries"]:
        screen.line("nothing was sent to this channel")
        return 0
    rows = [
        (one["created"], one["event"], one["state"], str(one["tries"]), one["due"] or "", one["error"])
        for one in found["deliveries"]
    ]
    screen.table(Table(("CREATED", "EVENT", "STATE", "TRIES", "NEXT", "ERROR"), rows, narrow=(5,)))
    return 0


def _rotate(arguments: argparse.Namespace) -> int:
    made = AdminApi.from_arguments(arguments).request("POST", f"{_path(arguments)}/rotate")
    print(json.dumps(made) if arguments.json else f"secret   {made['secret']}")
    return 0


def _path(arguments: argparse.Namespace) -> str:
    return f"/channels/{quote(arguments.id, safe='')}"


def _list(arguments: argparse.Namespace) -> int:
    found = AdminApi.from_arguments(arguments).request("GET", "/channels")
    if arguments.json:
        print(json.dumps(found))
        return 0
    screen = Screen()
    if not found["channels"]:
        screen.line("no channels; `perfagent channels add webhook URL` makes one")
        return 0
    rows = [
        (
            channel["id"], channel["kind"], channel["min_severity"], channel["name"], channel["url"],
            "enabled" if channel["enabled"] else f"disabled: {channel['disabled_reason']}",
        )
        for channel in found["channels"]
    ]  # fmt: skip
    screen.table(Table(("ID", "KIND", "FROM", "NAME", "URL", "STATE"), rows, narrow=(3, 4, 5)))
    return 0


def _test(arguments: argparse.Namespace) -> int:
    tried = AdminApi.from_arguments(arguments).request("POST", f"{_path(arguments)}/test")
    arrived = tried["state"] == "delivered"
    if arguments.json:
        print(json.dumps(tried))
    else:
        print(f"arrived, the receiver answered {tried['status']}" if arrived else f"did not arrive: {tried['error']}")
    return 0 if arrived else 1


def _remove(arguments: argparse.Namespace) -> int:
    AdminApi.from_arguments(arguments).request("DELETE", _path(arguments))
    print(json.dumps({"id": arguments.id, "removed": True}) if arguments.json else f"{arguments.id} is removed")
    return 0
