"""What may come next on the command line, for a shell that asks by argcomplete's protocol. Loaded only then.

`eval "$(register-python-argcomplete perfagent)"` in the file that starts bash or zsh turns it on.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from importlib import metadata

from perfagent.command_line.parser import CommandParser

__all__ = ["complete"]


def complete(commands: Mapping[str, metadata.EntryPoint], summaries: Mapping[str, str]) -> None:
    """Answers the shell and ends the process."""
    try:
        import argcomplete
        from argcomplete.lexers import split_line
    except ModuleNotFoundError:
        sys.exit(1)  # the shell then completes names of files
    parser = CommandParser(prog="perfagent")
    parser.add_argument("--version", action="store_true", help="print the version")
    subparsers = parser.add_subparsers()
    written = split_line(os.environ["COMP_LINE"], int(os.environ["COMP_POINT"]))[3]
    chosen = next(iter(written[int(os.environ["_ARGCOMPLETE"]) :]), "")  # behind `perfagent`, or `python -m perfagent`
    for name, entry in commands.items():
        below = subparsers.add_parser(name, help=summaries.get(name, ""))
        if name == chosen:  # only its module is loaded
            entry.load()(below)
    argcomplete.autocomplete(parser, always_complete_options=False)  # options once a "-" is typed
