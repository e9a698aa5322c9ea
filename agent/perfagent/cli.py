"""The `perfagent` command. Subcommands are found by entry points, so that this package imports no other of ours, and only the
module of the chosen one is loaded. A subcommand is `def command(parser)`: it adds arguments and sets `run` as a default."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from importlib import metadata

from perfagent import __version__
from perfagent.errors import PerfagentError

__all__ = ["main"]

GROUP = "perfagent.commands"

# One line each, here rather than in their modules, so that `perfagent --help` loads none of them.
SUMMARIES = {
    "up": "start the server with its dashboard",
    "run": "run a training script under the monitor, unchanged",
    "demo": "train a small real model here and watch it",
    "runs": "list runs",
    "show": "verdict, findings and latest values of a run",
    "export": "write a run's samples as JSON lines, CSV or Parquet",
    "delete": "delete a run",
    "profile": "profile some steps of a running training",
    "stacks": "show what every thread of a running training is doing",
    "watch": "follow a run in the terminal",
    "compare": "compare two runs",
    "backtest": "judge recorded curves with the rules",
    "channels": "add, list, test and remove webhook receivers",
    "keys": "create, list and revoke API keys",
    "db": "upgrade, back up and restore the database",
    "sync": "send what was recorded offline",
    "doctor": "check this machine and the connection",
    "estimate": "estimate the memory that training needs",
    "tune": "find batch size and number of workers",
    "bench": "measure what a technique gains on this machine",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one command and exits: 0 success, 1 failure, 2 wrong use."""
    sys.exit(_main(list(sys.argv[1:] if arguments is None else arguments)))


def _main(words: list[str]) -> int:
    local_rank = words.pop(0) if words and re.fullmatch(r"--local[_-]rank=\d+", words[0]) else None
    found = {entry.name: entry for entry in metadata.entry_points(group=GROUP)}
    name = words[0] if words else ""
    if name in ("-V", "--version"):
        sys.stdout.write(f"perfagent {__version__}\n")
        return 0
    if name in ("", "-h", "--help", "help"):
        sys.stdout.write(_help(found))
        return 0 if name else 2
    entry = found.get(name)
    if entry is None:
        sys.stderr.write(f"perfagent: there is no command {name!r}; `perfagent --help` lists them\n")
        return 2
    try:
        command = entry.load()
    except ModuleNotFoundError as error:
        sys.stderr.write(f"perfagent {name}: {error.name or error} is missing; {_cure(entry.value)}\n")
        return 1
    parser = argparse.ArgumentParser(prog=f"perfagent {name}", allow_abbrev=False)
    command(parser)
    options = parser.parse_args(words[1:])
    if local_rank is not None:
        options.local_rank_argument = local_rank
    try:
        return int(options.run(options) or 0)
    except PerfagentError as error:
        sys.stderr.write(f"perfagent {name}: {error}\n")
        return 1
    except ModuleNotFoundError as error:
        if error.name != "torch":  # what else is missing, a script of the user's may want
            raise
        sys.stderr.write(f"perfagent {name}: this command needs torch, which is missing here; pip install torch\n")
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # perfagent export ... | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1


def _help(found: dict[str, metadata.EntryPoint]) -> str:
    lines = [
        "usage: perfagent COMMAND ...",
        "",
        "A training-job monitor: what holds a training run back, live and with its cause.",
        "",
        "commands:",
    ]
    order = [*(name for name in SUMMARIES if name in found), *(name for name in sorted(found) if name not in SUMMARIES)]
    for name in order:
        entry = found[name]
        missing = "" if _installed(entry) else f"  ({_cure(entry.value)})"
        lines.append(f"  {name:<10} {SUMMARIES.get(name, entry.value)}{missing}")
    lines += ["", "  perfagent COMMAND --help    what a command takes", "  perfagent --version", ""]
    return "\n".join(lines)


_NEEDS = {"perfagent_server": ("server", ("fastapi", "sqlalchemy", "uvicorn")), "perfagent_dashboard": ("dashboard", ("dash",))}


def _cure(value: str) -> str:
    extra = _NEEDS.get(value.partition(".")[0], ("", ()))[0]
    return f"in the checkout: pip install '.[{extra}]'" if extra else "install perfagent again"


def _installed(entry: metadata.EntryPoint) -> bool:
    """Whether the packages of a command's extra are there, without importing anything."""
    for distribution in _NEEDS.get(entry.value.partition(".")[0], ("", ()))[1]:
        try:
            metadata.distribution(distribution)
        except metadata.PackageNotFoundError:
            return False
    return True
