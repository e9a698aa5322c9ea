"""`perfagent alerts list|show|ack|mute|snooze|...` and `perfagent silences`: what people do with alerts, from a terminal.
`perfagent alerts add|rules|remove`: alerts of their own."""

from __future__ import annotations

import argparse
import json
from typing import Any
from urllib.parse import quote, urlencode

from perfagent.command_line.option_types import number_above
from perfagent.command_line.terminal_output import Screen, Table
from perfagent_server.commands.connection import AdminApi, add_options
from perfagent_server.commands.own_alerts import own_alerts

__all__ = ["alerts", "silences"]

_ACTS = {
    "ack": "somebody works on it: it is not repeated any more",
    "unack": "take that back",
    "mute": "keep its rule quiet in its run: for --for-s seconds, else until you unmute it",
    "unmute": "end that",
    "snooze": "keep this alert quiet: for --for-s seconds, else until it is resolved",
    "unsnooze": "end that",
    "resolve": "close it",
}
_WITH_TIME = ("mute", "snooze")
_MATCHERS = ("project", "tag", "run", "rule")


def alerts(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Alerts: what fires, what happened to one, and what people do with them. Each act has an undo. "
        "`add` makes an alert of your own, `rules` lists those."
    )
    actions = parser.add_subparsers(
        dest="action", required=True, metavar=f"list|show|{'|'.join(_ACTS)}|add|rules|remove"
    )
    show_all = actions.add_parser("list", help="list alerts, newest first")
    show_all.add_argument("--state", choices=("firing", "resolved"), help="only those")
    show_all.add_argument("--run", dest="of_run", metavar="ID", help="only those of this run")
    show_all.add_argument("--project", metavar="NAME", help="only those of this project")
    show_all.set_defaults(run=_list)
    show = actions.add_parser("show", help="show an alert with its history")
    show.add_argument("id", help="the alert's id, as `alerts list` shows it")
    show.set_defaults(run=_show)
    add_options(show_all)
    add_options(show)
    for name, what in _ACTS.items():
        act = actions.add_parser(name, help=what)
        act.add_argument("id", help="the alert's id, as `alerts list` shows it")
        act.add_argument("--note", default="", help="what others should know")
        if name in _WITH_TIME:
            act.add_argument("--for-s", type=number_above(0, 365 * 86400), metavar="S", help="for how many seconds")
        act.set_defaults(run=_act)
        add_options(act)
    own_alerts(actions)


def silences(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Silences: no channel gets alerts of the runs that they match. Every day or week again: maintenance."
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="add|list|remove")
    add = actions.add_parser("add", help="make a silence")
    for name in _MATCHERS:
        add.add_argument(f"--{name}", dest=f"of_{name}", default="", help=f"only this {name}")
    add.add_argument("--starts", metavar="TIME", help="as 2026-03-01T12:00:00Z (default: now)")
    length = add.add_mutually_exclusive_group(required=True)
    length.add_argument("--for-s", type=number_above(0, 365 * 86400), metavar="S", help="for how many seconds")
    length.add_argument("--ends", metavar="TIME", help="until then")
    add.add_argument("--repeats", choices=("daily", "weekly"), default="", help="again, in UTC")
    add.add_argument("--note", default="", help="what others should know")
    add.set_defaults(run=_silence)
    show = actions.add_parser("list", help="list silences")
    show.set_defaults(run=_silences)
    remove = actions.add_parser("remove", help="end a silence: what still fires is sent now")
    remove.add_argument("id", help="the silence's id, as `silences list` shows it")
    remove.set_defaults(run=_unsilence)
    for action in (add, show, remove):
        add_options(action)


def _list(arguments: argparse.Namespace) -> int:
    given = {"state": arguments.state, "run": arguments.of_run, "project": arguments.project}
    wanted = {name: value for name, value in given.items() if value is not None}
    found = AdminApi.from_arguments(arguments).request("GET", f"/alerts?{urlencode(wanted)}")
    if arguments.json:
        print(json.dumps(found))
        return 0
    screen = Screen()
    if not found["alerts"]:
        screen.line("no alerts")
        return 0
    rows = [
        (one["id"], one["state"], one["severity"], one["run"], one["since"], _who(one), one["title"] or one["message"])
        for one in found["alerts"]
    ]
    screen.table(Table(("ID", "STATE", "SEVERITY", "RUN", "SINCE", "WHO", "WHAT"), rows, narrow=(6,)))
    return 0


def _who(alert: dict[str, Any]) -> str:
    quiet = [word for word in ("muted", "snoozed", "silenced") if alert[f"{word}_until"]]
    return ", ".join([alert["acknowledged_by"]] * bool(alert["acknowledged"]) + quiet)


def _show(arguments: argparse.Namespace) -> int:
    found = AdminApi.from_arguments(arguments).request("GET", f"/alerts/{quote(arguments.id, safe='')}")
    if arguments.json:
        print(json.dumps(found))
        return 0
    screen = Screen()
    screen.line(f"{found['severity']}  {found['rule']}  {found['state']}  run {found['run']}")
    screen.line(found["message"])
    if found["fix"]:
        screen.line(f"What to do: {found['fix']}")
    rows = [(one["time"], one["event"], one["who"], one["note"]) for one in found["history"]]
    screen.table(Table(("TIME", "EVENT", "WHO", "NOTE"), rows, narrow=(3,)))
    return 0


def _act(arguments: argparse.Namespace) -> int:
    body: dict[str, Any] = {"note": arguments.note}
    if arguments.action in _WITH_TIME and arguments.for_s is not None:
        body["for_s"] = arguments.for_s
    path = f"/alerts/{quote(arguments.id, safe='')}/{arguments.action}"
    changed = AdminApi.from_arguments(arguments).request("POST", path, body)
    print(json.dumps(changed) if arguments.json else f"{arguments.id}: {arguments.action} is done")
    return 0


def _silence(arguments: argparse.Namespace) -> int:
    given = {name: getattr(arguments, f"of_{name}") for name in _MATCHERS}
    given |= {name: getattr(arguments, name) for name in ("starts", "ends", "for_s", "repeats", "note")}
    body = {name: value for name, value in given.items() if value not in (None, "")}
    made = AdminApi.from_arguments(arguments).request("POST", "/silences", body)
    print(json.dumps(made) if arguments.json else f"silence  {made['id']}  until {made['ends']}")
    return 0


def _silences(arguments: argparse.Namespace) -> int:
    found = AdminApi.from_arguments(arguments).request("GET", "/silences")
    if arguments.json:
        print(json.dumps(found))
        return 0
    screen = Screen()
    if not found["silences"]:
        screen.line("no silences")
        return 0
    rows = [
        (
            one["id"], "on" if one["active"] else "off", ", ".join(f"{name} {one[name]}" for name in _MATCHERS if one[name]),
            one["starts"], one["ends"], one["repeats"], one["who"], one["note"],
        )
        for one in found["silences"]
    ]  # fmt: skip
    screen.table(Table(("ID", "STATE", "MATCHES", "STARTS", "ENDS", "REPEATS", "WHO", "NOTE"), rows, narrow=(2, 7)))
    return 0


def _unsilence(arguments: argparse.Namespace) -> int:
    AdminApi.from_arguments(arguments).request("DELETE", f"/silences/{quote(arguments.id, safe='')}")
    print(json.dumps({"id": arguments.id, "removed": True}) if arguments.json else f"{arguments.id} is removed")
    return 0
