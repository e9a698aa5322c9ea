"""`perfagent channels add|list|test|remove`: who receives alerts. Asks the running server."""

from __future__ import annotations

import argparse
import json
from urllib.parse import quote

from perfagent.command_line.terminal_output import Screen, Table
from perfagent_server.commands.connection import AdminApi, add_options

__all__ = ["command"]


def command(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Channels receive alerts. A webhook's secret is shown once, when it is added; receivers verify with it."
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="add|list|test|remove")
    add = actions.add_parser("add", help="add a channel and print its secret")
    add.add_argument("kind", choices=("webhook",))
    add.add_argument("url", metavar="URL", help="where alerts are POSTed, signed by the Standard Webhooks convention")
    add.add_argument("--name", default="", help="what to call it (default: its URL)")
    add.add_argument(
        "--min-severity",
        choices=("info", "warning", "critical"),
        default="warning",
        help="the lowest severity that is sent",
    )
    add.set_defaults(run=_add)
    show = actions.add_parser("list", help="list channels, without their secrets")
    show.set_defaults(run=_list)
    test = actions.add_parser("test", help="send a test and say whether it arrived")
    test.add_argument("id", help="the channel's id, as `channels list` shows it")
    test.set_defaults(run=_test)
    remove = actions.add_parser("remove", help="remove a channel")
    remove.add_argument("id", help="the channel's id, as `channels list` shows it")
    remove.set_defaults(run=_remove)
    for action in (add, show, test, remove):
        add_options(action)


def _add(arguments: argparse.Namespace) -> int:
    body = {
        "kind": arguments.kind,
        "url": arguments.url,
        "name": arguments.name,
        "min_severity": arguments.min_severity,
    }
    made = AdminApi.from_arguments(arguments).request("POST", "/channels", body)
    if arguments.json:
        print(json.dumps(made))
    else:
        print(f"channel  {made['id']}\nsecret   {made['secret']}")
    return 0


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
    tried = AdminApi.from_arguments(arguments).request("POST", f"/channels/{quote(arguments.id, safe='')}/test")
    arrived = tried["state"] == "delivered"
    if arguments.json:
        print(json.dumps(tried))
    else:
        print(f"arrived, the receiver answered {tried['status']}" if arrived else f"did not arrive: {tried['error']}")
    return 0 if arrived else 1


def _remove(arguments: argparse.Namespace) -> int:
    AdminApi.from_arguments(arguments).request("DELETE", f"/channels/{quote(arguments.id, safe='')}")
    print(json.dumps({"id": arguments.id, "removed": True}) if arguments.json else f"{arguments.id} is removed")
    return 0
