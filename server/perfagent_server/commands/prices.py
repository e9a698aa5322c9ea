"""`perfagent prices set|list|remove`: what hours and energy cost in a project. Asks the running server."""

from __future__ import annotations

import argparse
import json
from typing import Any
from urllib.parse import quote

from perfagent.command_line.option_types import number_above
from perfagent.command_line.terminal_output import Screen, Table
from perfagent_server.commands.connection import AdminApi, add_options

__all__ = ["command"]

_AMOUNTS = ("gpu_hour", "cpu_core_hour", "kwh")


def command(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "With prices, `show`, the API and alerts say what a run has cost, and what a finding costs an hour."
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="set|list|remove")
    change = actions.add_parser("set", help="set the price of a project, or of all that have none of their own")
    change.add_argument("--gpu-hour", type=number_above(0, 1e9), metavar="AMOUNT", help="of one GPU")
    change.add_argument("--cpu-core-hour", type=number_above(0, 1e9), metavar="AMOUNT", help="of one CPU core")
    change.add_argument("--kwh", type=number_above(0, 1e9), metavar="AMOUNT", help="of the energy of the GPUs")
    change.add_argument("--currency", required=True, help="such as EUR")
    change.set_defaults(run=_set)
    show = actions.add_parser("list", help="list prices")
    show.set_defaults(run=_list)
    remove = actions.add_parser("remove", help="take a price away")
    remove.set_defaults(run=_remove)
    for action in (change, remove):
        action.add_argument(
            "--project", default="", metavar="NAME", help="default: all projects without a price of their own"
        )
    for action in (change, show, remove):
        add_options(action)


def _set(arguments: argparse.Namespace) -> int:
    amounts = {name: value for name in _AMOUNTS if (value := getattr(arguments, name)) is not None}
    body = {**amounts, "currency": arguments.currency}
    made = AdminApi.from_arguments(arguments).request("PUT", _path(arguments.project), body)
    print(json.dumps(made) if arguments.json else f"{arguments.project or 'all projects'}: {_words(made)}")
    return 0


def _list(arguments: argparse.Namespace) -> int:
    found = AdminApi.from_arguments(arguments).request("GET", "/prices")
    if arguments.json:
        print(json.dumps(found))
        return 0
    screen = Screen()
    if not found["prices"]:
        screen.line("no prices; `perfagent prices set --gpu-hour 2.50 --currency EUR` makes one")
        return 0
    rows = [
        (one["project"] or "(all others)", *("" if one[name] is None else f"{one[name]:g}" for name in _AMOUNTS), one["currency"])
        for one in found["prices"]
    ]  # fmt: skip
    screen.table(Table(("PROJECT", "GPU HOUR", "CPU CORE HOUR", "KWH", "CURRENCY"), rows, right=range(1, 4)))
    return 0


def _remove(arguments: argparse.Namespace) -> int:
    AdminApi.from_arguments(arguments).request("DELETE", _path(arguments.project))
    print(
        json.dumps({"removed": arguments.project})
        if arguments.json
        else f"{arguments.project or 'all projects'}: no price"
    )
    return 0


def _path(project: str) -> str:
    return f"/prices?project={quote(project, safe='')}" if project else "/prices"


def _words(price: dict[str, Any]) -> str:
    units = {"gpu_hour": "a GPU hour", "cpu_core_hour": "a CPU core hour", "kwh": "a kWh"}
    return ", ".join(
        f"{price[name]:g} {price['currency']} {unit}" for name, unit in units.items() if price[name] is not None
    )
