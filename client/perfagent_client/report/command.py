"""`perfagent report RUN -o FILE`: a run as one HTML file, read without a server."""

from __future__ import annotations

import argparse
from pathlib import Path

from perfagent_client.commands import output
from perfagent_client.connection import add_options, add_run, found, reader

__all__ = ["report"]


def report(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Writes one HTML file on a run: verdict, evidence, alerts, charts, timing, configuration, console. It is read "
        "offline, asks for nothing and has no script."
    )
    add_run(parser)
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", required=True, help="write here; `-` is standard output"
    )
    add_options(parser, as_json=False)
    parser.set_defaults(run=_report)


def _report(arguments: argparse.Namespace) -> int:
    # Not in every start of the command, and before a server is asked: jinja2 may be missing.
    from perfagent_client.report.facts import read_facts
    from perfagent_client.report.page import report_html

    with reader(arguments) as client:
        run = found(client, arguments.name_or_id)
        html = report_html(read_facts(client, run))
    with output(None if str(arguments.output) == "-" else arguments.output) as file:
        file.write(html.encode("utf-8", "replace"))
    return 0
