"""How every command reads its options, and what it says of wrong ones.

Wrong use is one line, `perfagent CMD: what was given, what is allowed; see perfagent CMD --help`, and exit code 2. A
command that needs something and was given nothing at all shows its help before that."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

__all__ = ["CommandParser", "closest"]

_KINDS = {"int": "a whole number", "float": "a number"}


class CommandParser(argparse.ArgumentParser):
    """Parsers of sub-commands are of this class too: argparse makes them of the class of the one above."""

    def __init__(self, *given: Any, **options: Any) -> None:
        options.setdefault("allow_abbrev", False)
        super().__init__(*given, **options)
        self._nothing_given = False

    def parse_known_args(  # type: ignore[override] # the overloads of the base are about namespaces of other classes
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        self._nothing_given = args is not None and not args
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        if self._nothing_given:
            self.print_help(sys.stderr)
            sys.stderr.write("\n")
        self.exit(2, f"{self.prog}: {_in_our_words(message)}; see `{self.prog} --help`\n")


def closest(word: str, allowed: Sequence[str]) -> str | None:
    """The allowed word that was probably meant."""
    from difflib import get_close_matches  # not in every start of the command

    return next(iter(get_close_matches(word, allowed, 1, 0.6)), None)


def _in_our_words(message: str) -> str:
    """argparse's English, which names its own functions and types, in the form that all our messages have."""
    if missing := re.fullmatch(r"the following arguments are required: (.*)", message):
        names = missing[1].split(", ")
        return f"{names[0]} is missing" if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]} are missing"
    if unknown := re.fullmatch(r"unrecognized arguments: (\S+).*", message, re.DOTALL):
        word = unknown[1]
        return f"there is no option {word}" if word.startswith("-") else f"{word!r} is one argument too many"
    if about := re.fullmatch(r"argument ([^:]+): (.*)", message, re.DOTALL):
        return _about_argument(about[1], about[2])
    return message


def _about_argument(name: str, problem: str) -> str:
    if choice := re.fullmatch(r"invalid choice: '(.*)' \(choose from (.*)\)", problem, re.DOTALL):
        allowed = [word.strip("'") for word in choice[2].split(", ")]
        meant = closest(choice[1], allowed)
        return f"{name} is {choice[1]!r}; allowed are {', '.join(allowed)}" + (
            f" (did you mean {meant}?)" if meant else ""
        )
    if value := re.fullmatch(r"invalid (\w+) value: '(.*)'", problem, re.DOTALL):
        return f"{name} is {value[2]!r}; {_KINDS.get(value[1], f'a {value[1]}')} is allowed"
    if re.fullmatch(r"expected (one|at least one) argument", problem):
        return f"{name} needs a value"
    if extra := re.fullmatch(r"ignored explicit argument '(.*)'", problem):
        return f"{name} takes no value, and {extra[1]!r} was given"
    return f"{name} {problem}" if problem.startswith("is ") else f"{name}: {problem}"
