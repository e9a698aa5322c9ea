"""Errors for calls of ours that cannot work: one sentence, and a traceback that ends at the script's own line.
Scripts come from other trackers: for the names of their options and functions the error says what perfagent has
instead. What perfagent takes of their calls is in other_trackers.py.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable
from inspect import CO_VARKEYWORDS
from pathlib import Path
from types import FunctionType
from typing import ParamSpec, TypeVar, cast

from perfagent.errors import ConfigError

__all__ = ["FUNCTIONS", "OPTIONS", "WORDS", "checked", "instead_of", "unknown_option"]

P = ParamSpec("P")
R = TypeVar("R")

WORDS = json.loads(Path(__file__).with_name("other_trackers.json").read_text(encoding="utf-8"))
OPTIONS: dict[str, str] = WORDS["options"]
"""Options of `init` in other trackers, and what perfagent has instead."""
FUNCTIONS: dict[str, str] = WORDS["functions"]
"""Functions and classes of other trackers, and what perfagent has instead."""


def instead_of(name: str, public: Iterable[str]) -> str:
    """For an attribute that is not there: what perfagent has in its place."""
    return f"it has {FUNCTIONS[name]}" if name in FUNCTIONS else f"it has {', '.join(public)}"


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Around a documented function: an argument that it does not have is named with what there is instead, and its own
    ConfigError comes without the frames of ours in which it was found."""
    code = cast(FunctionType, function).__code__
    takes = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        unknown = None if code.co_flags & CO_VARKEYWORDS else next((name for name in kwargs if name not in takes), None)
        if unknown is not None:
            raise TypeError(unknown_option(code.co_name, unknown, takes))
        try:
            return function(*args, **kwargs)
        except ConfigError as error:
            raise error.with_traceback(None) from None

    return call


def unknown_option(function: str, given: str, takes: Iterable[str]) -> str:
    """takes: the arguments that the function has."""
    if given in OPTIONS:
        return f"{function}() has no argument {given!r}; perfagent has {OPTIONS[given]}"
    import difflib  # not with the training: few calls are wrong

    near = difflib.get_close_matches(given, known := [*takes], 1)
    instead = f"did you mean {near[0]}=?" if near else f"it takes {', '.join(known)}"
    return f"{function}() has no argument {given!r}; {instead}"
