# PYTHON_ARGCOMPLETE_OK
"""The `perfagent` command. Subcommands are found by entry points, so that this package imports no other of ours, and
only the module of the chosen one is loaded. A subcommand is `def command(parser)`: it adds arguments and sets `run`
as a default."""

from __future__ import annotations

import io
import os
import re
import sys
from argparse import Namespace
from collections.abc import Sequence
from importlib import metadata
from importlib.util import find_spec

from perfagent import __version__
from perfagent.command_line.parser import CommandParser, closest
from perfagent.errors import PerfagentError, ServerUnreachable, how_to_install

__all__ = ["main"]

GROUP = "perfagent.commands"

# One line each, here rather than in their modules, so that `perfagent --help` loads none of them.
GROUPS = {
    "Train and watch": {
        "up": "start the server with its dashboard",
        "run": "run a training script under the monitor, unchanged",
        "demo": "train a small real model here and watch it",
        "sync": "send what was recorded offline",
        "doctor": "check this machine and the connection",
    },
    "Look at runs": {
        "runs": "list runs",
        "show": "verdict, evidence and figures of a run; --follow watches it",
        "watch": "watch all runs, or one, live in this terminal; acknowledge and mute alerts",
        "compare": "how much faster or slower a run is than another, and why",
        "report": "write one HTML file on a run, to read offline or to send",
        "wait": "wait for a step, a finding or the end of a run",
        "mcp": "let an AI agent read runs, by the Model Context Protocol",
        "export": "write a run's samples as JSON lines, CSV or Parquet",
        "diagnose": "say what is wrong with runs in files of any tracker, or with crash logs; needs no server",
        "import": "bring old runs of any tracker into the server",
        "gate": "fail a build whose training is slower or sicker than before",
        "delete": "delete a run",
        "profile": "profile some steps of a running training",
        "stacks": "show what every thread of a running training is doing",
        "stop": "end a running training after a step of all its ranks",
    },
    "Make training faster": {
        "estimate": "estimate the memory that training needs",
        "tune": "find batch size and number of workers",
        "bench": "measure what a technique gains on this machine, or how many agents a server serves",
    },
    "Administer the server": {
        "channels": "say where alerts are sent: webhooks, chats, mail",
        "alerts": "list alerts; acknowledge, mute, snooze and resolve them; make your own",
        "silences": "keep the alerts of some runs quiet for a time",
        "prices": "set what hours and energy cost: runs and findings then show money",
        "keys": "create, list, limit and revoke API keys",
        "db": "upgrade, back up and restore the database",
        "retention": "set how long data is kept; preview what would be deleted",
        "users": "add, list and remove users, and give them roles",
    },
}
_NOT_RUN = {"diagnose": 3, "gate": 3}
"""Exit code for a missing package, of commands whose 1 is a verdict."""
SUMMARIES = {name: summary for group in GROUPS.values() for name, summary in group.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one command and exits: 0 success, 1 failure (3 of those whose 1 is a verdict), 2 wrong use."""
    if "_ARGCOMPLETE" in os.environ:  # the shell asks what may come next
        from perfagent.command_line.completion import complete

        complete(_commands(), SUMMARIES)
    for stream in (sys.stdout, sys.stderr):  # a console without UTF-8 shows ? for what it lacks
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "backslashreplace"):
            stream.reconfigure(errors="replace")
    sys.exit(_main(list(sys.argv[1:] if arguments is None else arguments)))


def _commands() -> dict[str, metadata.EntryPoint]:
    return {entry.name: entry for entry in metadata.entry_points(group=GROUP)}


def _main(words: list[str]) -> int:
    local_rank = words.pop(0) if words and re.fullmatch(r"--local[_-]rank=\d+", words[0]) else None
    found = _commands()
    name = words[0] if words else ""
    if name in ("-V", "--version"):
        sys.stdout.write(f"perfagent {__version__}\n")
        return 0
    if name in ("", "-h", "--help", "help"):
        sys.stdout.write(_help(found))
        return 0 if name else 2
    entry = found.get(name)
    if entry is None:
        sys.stderr.write(_unknown(name, found))
        return 2
    options = Namespace()
    try:
        command = entry.load()
        parser = CommandParser(prog=f"perfagent {name}")
        command(parser)
        options = parser.parse_args(words[1:])
        if local_rank is not None:
            options.local_rank_argument = local_rank
        return int(options.run(options) or 0)
    except PerfagentError as error:
        sys.stderr.write(f"perfagent {name}: {_in_one_line(str(error))}{_other_way(error, options)}\n")
        return error.exit_code
    except ModuleNotFoundError as error:
        if not hasattr(options, "run") or error.name in _needs(entry.value)[1]:
            sys.stderr.write(f"perfagent {name}: {error.name or error} is missing; {_cure(entry.value)}\n")
            return _NOT_RUN.get(name, 1)
        if error.name != "torch":  # what else is missing, a script of the user's may want
            raise
        sys.stderr.write(f"perfagent {name}: this command needs torch, which is missing here; pip install torch\n")
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # perfagent export ... | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1


def _other_way(error: PerfagentError, options: Namespace) -> str:
    """Hint at what a command could have used, if its key is refused or nobody answers at its address."""
    if not (hasattr(options, "server") and hasattr(options, "data")):
        return ""
    from perfagent.endpoint.local_server import LocalServer, data_folder, found_server, server_address

    if isinstance(error, ServerUnreachable):
        own = None if options.data else found_server()
        if own in (None, server_address(options.server).rstrip("/")):
            return ""
        return f" (your server on this machine listens at {own}: unset PERFAGENT_SERVER, or give --server {own})"
    if error.status not in (401, 403) or not os.environ.get("PERFAGENT_API_KEY"):
        return ""
    local = LocalServer(options.data.expanduser() if options.data else data_folder())
    if local.proof_for(server_address(options.server, options.data)) is None:
        return ""
    return " (PERFAGENT_API_KEY is set, so that key was used; unset it to act as this server's administrator)"


def _in_one_line(message: str) -> str:
    """For a person at a shell: what a database says has many lines, and a server advises requests."""
    listed = r"GET /api/v1/(?:(runs)|(alerts|silences|channels|keys|users|prices|retention))\b"
    advised = re.sub(listed, lambda found: f"`perfagent {found[1] or f'{found[2]} list'}`", message)
    return " ".join(advised.split())


def _unknown(name: str, found: dict[str, metadata.EntryPoint]) -> str:
    if name.startswith("-"):
        return f"perfagent: there is no option {name}; `perfagent --help` lists the commands, each has --help\n"
    meant = closest(name, list(found))
    hint = f"did you mean `perfagent {meant}`? " if meant else ""
    return f"perfagent: there is no command {name!r}; {hint}`perfagent --help` lists them\n"


def _help(found: dict[str, metadata.EntryPoint]) -> str:
    lines = ["usage: perfagent COMMAND ...", "", "Monitor PyTorch training: live metrics, why it is slow, what broke."]
    others = {name: found[name].value for name in sorted(found) if name not in SUMMARIES}  # of other packages
    for title, group in {**GROUPS, "Other commands": others}.items():
        there = {name: summary for name, summary in group.items() if name in found}
        if there:
            lines += ["", f"{title}:"]
        for name, summary in there.items():
            missing = "" if _installed(found[name]) else f"  ({_cure(found[name].value)})"
            lines.append(f"  {name:<10} {summary}{missing}")
    lines += ["", "  perfagent COMMAND --help    what a command takes", "  perfagent --version", ""]
    return "\n".join(lines)


_NEEDS = {
    "perfagent_server.commands.diagnose": ("diagnose", ("numpy",)),
    "perfagent_server": ("server", ("fastapi", "sqlalchemy", "uvicorn", "dash", "psycopg")),
    "perfagent_client.mcp": ("mcp", ("mcp",)),
    "perfagent_client.report": ("cli", ("jinja2",)),
    "perfagent_client.watch": ("cli", ("textual", "websockets")),
}
"""Package -> the extra that its commands need, and the packages of that extra by which to tell whether it is there."""


def _needs(value: str) -> tuple[str, tuple[str, ...]]:
    """The extra, and its packages, that the command behind an entry point needs."""
    packages = (package for package in _NEEDS if f"{value.partition(':')[0]}.".startswith(f"{package}."))
    return _NEEDS.get(next(packages, ""), ("", ()))


def _cure(value: str) -> str:
    extra = _needs(value)[0]
    return how_to_install(extra) if extra else "install perfagent again"


def _installed(entry: metadata.EntryPoint) -> bool:
    """Whether the packages of a command's extra are there, without importing anything."""
    return all(find_spec(package) is not None for package in _needs(entry.value)[1])
