"""`perfagent retention list|set|remove|preview`: how long what is kept. Asks the running server."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlencode

from perfagent.command_line.option_types import number_above
from perfagent.command_line.terminal_output import Screen, Table
from perfagent_server.commands.connection import AdminApi, add_options

__all__ = ["command"]

FOREVER = "forever"
_LIMITS = {
    "samples_days": "full resolution; then cells of 16 steps stay",
    "rollup16_days": "cells of 16 steps, from a run's end; then cells of 256 steps stay",
    "rollup256_days": "cells of 256 steps, from a run's end; then cells of 4096 steps stay",
    "runs_days": "runs, from their end",
    "events_days": "console lines, stacks and other events",
    "profiles_days": "profiles",
    "media_days": "images, audio, tables and histograms",
    "alerts_days": "alerts that are over",
    "max_bytes": "so many bytes of the project, or of the whole database; then the oldest runs lose detail",
}


def command(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "How long the server keeps what, for all projects or for one. A run with the tag `keep` stays whole."
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="list|set|remove|preview")
    show = actions.add_parser("list", help="list what is in force")
    show.set_defaults(run=_list)
    change = actions.add_parser(
        "set", help="set what is named, for a project, or for all that have nothing of their own"
    )
    for name, words in _LIMITS.items():
        metavar = "BYTES" if name == "max_bytes" else "DAYS"
        change.add_argument(f"--{name.replace('_', '-')}", type=_limit, metavar=metavar, help=f"keep {words}")
    change.set_defaults(run=_set)
    remove = actions.add_parser("remove", help="take back what was set: what is named, or all of it")
    for name in _LIMITS:
        remove.add_argument(f"--{name.replace('_', '-')}", action="store_true", help="take back this one")
    remove.set_defaults(run=_remove)
    preview = actions.add_parser("preview", help="print what would go now; changes nothing")
    preview.set_defaults(run=_preview)
    for action in (change, remove):
        action.add_argument("--project", default="", metavar="NAME", help="default: all projects")
    for action in (show, change, remove, preview):
        add_options(action)


def _limit(text: str) -> float | str:
    return FOREVER if text == FOREVER else number_above(0, 1e15)(text)


def _set(arguments: argparse.Namespace) -> int:
    body = {name: value for name in _LIMITS if (value := getattr(arguments, name)) is not None}
    made = AdminApi.from_arguments(arguments).request("PATCH", _path(arguments.project), body)
    print(json.dumps(made) if arguments.json else f"{_named(made['project'])}: {_words(made)}")
    return 0


def _list(arguments: argparse.Namespace) -> int:
    found = AdminApi.from_arguments(arguments).request("GET", "/retention")
    if arguments.json:
        print(json.dumps(found))
        return 0
    rows = [
        (_named(one["project"]), *(_number(one["in_force"][name]) for name in _LIMITS)) for one in found["policies"]
    ]
    heads = ("PROJECT", *(name.replace("_", " ").upper() for name in _LIMITS))
    Screen().table(Table(heads, rows, right=range(1, len(heads))))
    return 0


def _remove(arguments: argparse.Namespace) -> int:
    fields = [name for name in _LIMITS if getattr(arguments, name)]
    AdminApi.from_arguments(arguments).request("DELETE", _path(arguments.project, fields))
    if arguments.json:
        print(json.dumps({"removed": arguments.project, "fields": fields}))
    else:
        print(f"{_named(arguments.project)}: {', '.join(fields) or 'all'} taken back")
    return 0


def _preview(arguments: argparse.Namespace) -> int:
    found = AdminApi.from_arguments(arguments).request("GET", "/retention/preview")
    if arguments.json:
        print(json.dumps(found))
        return 0
    screen = Screen()
    if found["refused"]:
        screen.line(f"nothing goes now: {found['refused']}")
    for one in found["aged"]:
        screen.line(f"{one['count']:,} {one['what'].replace('_', ' ')}, {one['projects']}")
    for one in found["runs"]:
        screen.line(f"run {one['name']} ({one['run']}) of project {one['project']}, over since {one['over']}")
    for budget in found["budgets"]:
        of = "the database" if budget["project"] is None else f"project {budget['project']}"
        screen.line(
            f"{of} has {budget['used_bytes']:,} bytes of {budget['max_bytes']:,.0f}; these would go, in this order:"
        )
        for step in budget["steps"]:
            screen.line(f"  {step['action']} of {step['name']} ({step['run']}): some {step['bytes']:,} bytes")
    if not (found["aged"] or found["runs"] or found["budgets"]):
        screen.line("nothing would go")
    return 0


def _path(project: str, fields: Sequence[str] = ()) -> str:
    asked = [("project", project)] if project else []
    asked += [("field", field) for field in fields]
    return f"/retention?{urlencode(asked)}" if asked else "/retention"


def _named(project: str) -> str:
    return project or "(all others)"


def _number(value: float | None) -> str:
    return FOREVER if value is None else f"{value:g}" if value < 1e6 else f"{value:,.0f}"


def _words(shown: dict[str, Any]) -> str:
    """All that is limited, and what is kept for ever because somebody said so."""
    said = [
        f"{name} {_number(value)}"
        for name, value in shown["in_force"].items()
        if value is not None or name in shown["set"]
    ]
    return ", ".join(said) or "everything is kept for ever"
