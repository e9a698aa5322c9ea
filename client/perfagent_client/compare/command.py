"""`perfagent compare A B`: runs, or windows of runs, beside each other."""

from __future__ import annotations

import argparse

from perfagent.command_line.terminal_output import Screen
from perfagent.errors import ConfigError
from perfagent_client.compare.pages import comparison_page
from perfagent_client.connection import add_options, print_json, reader

__all__ = ["compare"]


def compare(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Compares runs with the first one: how much faster or slower, with a 95 % interval, and which phase makes the "
        "difference; loss, memory, settings, alerts, and whether a gain that was predicted has come. RUN:FROM-TO compares "
        "these steps only, so that two windows of one run can be compared, too."
    )
    parser.add_argument(
        "runs", nargs="+", metavar="RUN[:FROM-TO]", help="2 to 20 runs, by id or name; the first is the baseline"
    )
    parser.add_argument("--all", action="store_true", help="every setting and package that differs")
    add_options(parser)
    parser.set_defaults(run=_compare)


def _compare(arguments: argparse.Namespace) -> int:
    if len(arguments.runs) < 2:
        raise ConfigError("one run is given; at least two are compared, such as `perfagent compare before after`")
    with reader(arguments) as client:
        found = client.compare(arguments.runs)
    if arguments.json:
        print_json(found)
    else:
        Screen().parts(comparison_page(found, everything=arguments.all))
    return 0
