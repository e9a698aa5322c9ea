"""docs/reference/command-line.md: each command with its options."""

from __future__ import annotations

import argparse
import importlib
import re
import tomllib
from collections.abc import Iterator
from itertools import repeat
from pathlib import Path

from references.markdown import note, table

__all__ = ["command_line", "help_of", "parsers"]

_PROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"
_HEAD = """# Command line

{note}
Every command of `perfagent` with its arguments and options. `perfagent COMMAND --help` prints the same. What `--json` prints:
[JSON of the commands](commands.md). What an exit code means: [exit codes](exit-codes.md).

RUN is a run's id or its name; of several runs of one name, the newest is taken.

The commands that ask a server also take these, unless their own list says otherwise:

{common}"""
_COLUMNS = ("argument", "meaning")
_COMMON = ("--server", "--data", "--json")
"""Options that mean the same in most commands."""


def command_line() -> str:
    """The page."""
    made = parsers()
    runs = made["runs"]
    common = {row[0]: row for row in map(_row, runs._actions, repeat(runs)) if row[0].startswith(_COMMON, 1)}
    parts = [_HEAD.format(note=note("the parsers of the commands"), common=table(_COLUMNS, common.values()))]
    for name, parser in sorted(made.items()):
        parts += _sections(f"perfagent {name}", parser, "##", {*common.values()})
    return "\n".join(parts)


def parsers() -> dict[str, argparse.ArgumentParser]:
    """The parser of each command, made by the functions that pyproject.toml names."""
    made = {}
    for name, target in tomllib.loads(_PROJECT.read_text())["project"]["entry-points"]["perfagent.commands"].items():
        module, _, function = target.partition(":")
        made[name] = argparse.ArgumentParser(prog=f"perfagent {name}", allow_abbrev=False)
        getattr(importlib.import_module(module), function)(made[name])
    return made


def _sections(title: str, parser: argparse.ArgumentParser, level: str, common: set[tuple[str, str]]) -> Iterator[str]:
    yield f"{level} {title}\n"
    if parser.description:
        yield _prose(parser.description) + "\n"
    rows = [
        _row(action, parser)
        for action in parser._actions
        if action.help != argparse.SUPPRESS
        and not isinstance(action, argparse._SubParsersAction | argparse._HelpAction)
    ]
    if own := [row for row in rows if row not in common]:
        yield table(_COLUMNS, own)
    if parser.epilog:
        yield f"```text\n{parser.epilog.strip()}\n```\n"
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, below in action.choices.items():
                yield from _sections(f"{title} {name}", below, level + "#", common)


def _row(action: argparse.Action, parser: argparse.ArgumentParser) -> tuple[str, str]:
    return _called(action), help_of(action, parser)


def _called(action: argparse.Action) -> str:
    if not action.option_strings:
        return f"`{action.metavar or action.dest}`"
    value = "" if action.nargs == 0 else f" {action.metavar or _choices(action) or action.dest.upper()}"
    return ", ".join(f"`{option}{value}`" for option in action.option_strings)


def _choices(action: argparse.Action) -> str:
    return "{" + ",".join(map(str, action.choices)) + "}" if action.choices else ""


def help_of(action: argparse.Action, parser: argparse.ArgumentParser) -> str:
    """What the option means, as Markdown."""
    values = {**vars(action), "prog": parser.prog}
    return _prose((action.help or "") % values)


def _prose(text: str | None) -> str:
    """What looks like an option, a variable, an address or a path is code, so that Markdown leaves it alone."""
    words = " ".join((text or "").split())
    words = re.sub(r"(?<![\w`])(--[a-z][\w-]*|PERFAGENT_\w+|[a-z]+://\S+[\w/]|[~$][\w.]*/[\w./]+)", r"`\1`", words)
    return words.replace("<", "&lt;")
