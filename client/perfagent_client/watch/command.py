"""`perfagent watch [RUN]`: all runs, or one, live in this terminal."""

from __future__ import annotations

import argparse
import sys

from perfagent.command_line.terminal_output import is_terminal
from perfagent.errors import ConfigError
from perfagent_client.connection import add_options, add_run, found, reader

__all__ = ["watch"]


def watch(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Watches all runs in this terminal, what needs somebody first: verdicts, throughput, loss. Enter opens a run; a "
        "acknowledges its alert, m mutes it, ? shows all keys. Works over ssh."
    )
    add_run(parser, default="all runs")
    add_options(parser, as_json=False)
    parser.set_defaults(run=_watch)


def _watch(arguments: argparse.Namespace) -> int:
    from perfagent_client.watch.app import WatchApp  # not in every start of the command: textual may be missing

    if not (is_terminal(sys.stdin) and is_terminal(sys.stdout)):
        raise ConfigError(
            "this command draws on a terminal, and there is none; `perfagent runs` and `show --follow` print"
        )
    with reader(arguments, asks=True) as client:
        run = found(client, arguments.name_or_id).run if arguments.name_or_id else None
        server, key = client.server, client.api_key
        if run is None:  # an error of the server comes before the screen is cleared
            client.request("GET", "/runs", params={"limit": 1})
    WatchApp(server, key, run=run).run()
    return 0
