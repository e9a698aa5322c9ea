"""What must come of each program of a batch: reads its expected.toml. README.md tells of the keys."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from perfagent_server.rules.catalogue import all_rules

__all__ = ["Expectation", "WrongExpectationError", "expectation", "read"]

REMARKS_OF_HEALTHY = {"healthy": "", "compute_bound": "", "cpu_oversubscribed": "^[^.]*[.] Other programs use"}
"""The last is what the machine's other load does to a run, and says so."""
_CHOICES = {"alert": ("yes", "no", "either"), "judge": ("end", "live")}


class WrongExpectationError(ValueError):
    """An expected.toml that cannot be used. The message says what was given and what is allowed."""


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """accept: the rules of which the verdict or an alert must have one -> a pattern of its message, '' for any. also:
    rules whose alerts are tolerated beside it. alert: whether one at warning or critical must come. state: those in
    which the run may be. judge: "live" where only what was said before the program was ended counts. ranks: those that
    the finding should name, and names: a pattern of its cause; both are noted, not judged. pair: the healthy look-alike
    of a sick program, and the other way round. why: the reason for all this, in words."""

    healthy: bool = False
    accept: Mapping[str, str] = dataclasses.field(default_factory=dict)
    also: tuple[str, ...] = ()
    alert: Literal["yes", "no", "either"] = "yes"
    state: tuple[str, ...] = ()
    judge: Literal["end", "live"] = "end"
    limit_s: float = 120.0
    processes: int = 1
    ranks: tuple[int, ...] = ()
    names: str = ""
    pair: str = ""
    why: str = ""


def read(file: Path) -> dict[str, Expectation]:
    """By program. Raises WrongExpectationError."""
    try:
        tables = tomllib.loads(file.read_text("utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise WrongExpectationError(f"{file}: {error}") from error
    return {name: expectation(table, f"{file}: [{name}]") for name, table in tables.items()}


def expectation(table: Mapping[str, Any], place: str) -> Expectation:
    """One program's. place: where it stands, for the message of a WrongExpectationError."""
    kinds = {field.name: type(getattr(Expectation(), field.name)) for field in dataclasses.fields(Expectation)}
    for key, value in table.items():
        if key not in kinds:
            raise WrongExpectationError(f"{place} has the unknown key {key!r}; allowed are {', '.join(kinds)}")
        kind = {tuple: list, float: (int, float)}.get(kinds[key], kinds[key])
        if not isinstance(value, kind):
            raise WrongExpectationError(f"{place} has {key} = {value!r}, which has a wrong type")
        if key in _CHOICES and value not in _CHOICES[key]:
            raise WrongExpectationError(f"{place} has {key} = {value!r}; allowed are {', '.join(_CHOICES[key])}")
    given = {key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}
    if given.get("healthy"):
        given |= {"accept": REMARKS_OF_HEALTHY | given.get("accept", {}), "alert": "no"}
    found = Expectation(**given)
    if not found.accept:
        raise WrongExpectationError(f"{place} needs healthy = true, or accept = {{ rule_id = 'pattern' }}")
    _check_rules(found, place)
    return found


def _check_rules(found: Expectation, place: str) -> None:
    known = ["healthy", *(rule.id for rule in all_rules())]
    for rule in (*found.accept, *found.also):
        if rule not in known:
            raise WrongExpectationError(f"{place} names the unknown rule {rule!r}; there are {', '.join(known)}")
    for pattern in (*found.accept.values(), found.names):
        try:
            re.compile(pattern)
        except re.error as error:
            raise WrongExpectationError(f"{place} has a pattern that cannot be read, {pattern!r}: {error}") from error
