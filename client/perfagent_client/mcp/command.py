"""`perfagent mcp`: serves the tools to the program that started it, over standard input and output."""

from __future__ import annotations

import argparse
import sys

from perfagent_client.connection import add_options, reader

__all__ = ["mcp"]


def mcp(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Lets an AI agent read runs: a server of the Model Context Protocol on standard input and output, which the agent's "
        "program starts. It has eight tools, and none changes anything. A key with the scope read is enough (PERFAGENT_API_KEY)."
    )
    add_options(parser, as_json=False)
    parser.set_defaults(run=_mcp)


def _mcp(arguments: argparse.Namespace) -> int:
    from perfagent_client.mcp.server import server_of  # the SDK takes a second to import
    from perfagent_client.mcp.tools import Tools

    if sys.stdin.isatty():
        sys.stderr.write("perfagent mcp: the program of an AI agent starts this and talks to it here; Ctrl-C ends it\n")
    server_of(Tools(lambda: reader(arguments))).run("stdio")
    return 0
