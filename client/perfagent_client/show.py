"""`perfagent show RUN`: the verdict with its evidence, and the figures of a run, on one page. `--follow` keeps it up to
date."""

from __future__ import annotations

import argparse
import contextlib
import json

from perfagent.command_line.terminal_output import Screen
from perfagent.errors import PerfagentError
from perfagent.wire import Series, to_json
from perfagent_client.client import Client
from perfagent_client.connection import add_options, add_run, found, print_json, reader
from perfagent_client.follow import follow
from perfagent_client.models import RunDetails
from perfagent_client.page import Section, fitted, flat
from perfagent_client.run_sections import Facts, sections

__all__ = ["show"]

MOST_LINES = 60
_CURVE = 48
"""Buckets of the small curve of the loss."""


def show(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Shows one run on a page: verdict, evidence and fix, progress, where a step goes, and its newest figures."
    )
    add_run(parser)
    parser.add_argument("--all", action="store_true", help="also every layer, the whole evidence and the raw values")
    parser.add_argument(
        "--follow",
        action="store_true",
        help="keep watching until the run ends (exit code 0, however it ends) or Ctrl-C (130)",
    )
    add_options(parser)
    parser.set_defaults(run=_show)


def _show(arguments: argparse.Namespace) -> int:
    screen = Screen()
    with reader(arguments) as client:
        run = found(client, arguments.name_or_id)

        def page(run: RunDetails, lines: int) -> list[Section]:
            made = sections(_facts(client, run), screen.wrapped, everything=arguments.all, bars=_writes_blocks(screen))
            return made if arguments.all else fitted(made, lines)

        if arguments.follow:
            as_json = (lambda: _print_json(client, run.run)) if arguments.json else None
            follow(client, run.run, screen, page, as_json=as_json)
            if arguments.json:
                return 0
            run = client.run(run.run)
        if arguments.json:
            _print_json(client, run.run)
        else:
            screen.parts(flat(page(run, MOST_LINES)))
    return 0


def _print_json(client: Client, run: str) -> None:
    summary = json.loads(to_json(client.run(run)))
    verdict, findings, latest = client.verdict(run), client.findings(run), client.latest(run)
    alerts, timing = client.alerts(run), client.timing(run)
    figures = {name: item.value for name, item in latest.items()}
    print_json(
        {**summary, "verdict": verdict, "findings": findings, "latest": figures, "timing": timing, "alerts": alerts}
    )


def _facts(client: Client, run: RunDetails) -> Facts:
    latest = client.latest(run.run)
    losses: Series | None = None
    name = "loss" if "loss" in latest else next((name for name in sorted(latest) if name.endswith("loss")), None)
    if name is not None:
        with contextlib.suppress(PerfagentError):  # a page without its curve is still a page
            losses = client.series(run.run, name, points=_CURVE)
    return Facts(
        run, client.verdict(run.run), client.findings(run.run), latest, client.timing(run.run), losses,
        f"{client.server}/run/{run.run}",
    )  # fmt: skip


def _writes_blocks(screen: Screen) -> bool:
    encoding = (getattr(screen.stream, "encoding", None) or "").lower()
    return encoding.startswith("utf")
