"""Comparisons in a search for runs: `config.lr = 1e-3`, `val/acc > 0.6`. Pure."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["Condition", "condition_text", "conditions_in"]

_COMPARED: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq, "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt,
    ">=": operator.ge,
}  # fmt: skip
_CONDITION = re.compile(
    r"(?<!\S)(config[.:][\w.-]+|[A-Za-z_][\w./-]*)(\s*)(==|!=|<=|>=|=|<|>)\s*(\"[^\"]*\"|[^\s=<>!]+)(?!\S)"
)
_SETTING = re.compile(r"config[.:]")


@dataclass(frozen=True, slots=True)
class Condition:
    """name: of a metric, whose newest value counts, of a setting (is_setting), with dots for what is in it, or `group` or
    `tag`."""

    name: str
    comparison: str
    value: str
    is_setting: bool

    def holds(self, value: Any) -> bool:
        """Of a value of a run, or of any of several; never of one that a run does not have. What is not two numbers is
        compared as text, and is neither more nor less."""
        if isinstance(value, list):
            each = [self.holds(one) for one in value]
            return all(each) if self.comparison == "!=" else any(each)
        if value is None:
            return False
        compare = _COMPARED[self.comparison]
        wanted, got = _number(self.value), _number(value)
        if wanted is not None and got is not None:
            return compare(got, wanted) if not math.isclose(got, wanted) else compare(wanted, wanted)
        return self.comparison in ("=", "==", "!=") and compare(str(value).lower(), self.value.lower())


def conditions_in(text: str) -> tuple[list[Condition], str]:
    """The comparisons in a search, and what is left of it. `lr=0.01` without spaces is left: runs of a sweep are called so."""
    found: list[Condition] = []

    def take(match: re.Match[str]) -> str:
        name, space, comparison, value = match.groups()
        is_setting = _SETTING.match(name) is not None
        if comparison == "=" and not space and not is_setting:
            return match[0]
        found.append(Condition(_SETTING.sub("", name, count=1), comparison, value.strip('"'), is_setting))
        return " "

    left = _CONDITION.sub(take, text).strip()
    return found, left


def condition_text(name: str, value: str) -> str | None:
    """The comparison that lets through the runs with this value; None where the search cannot spell it."""
    for text in (f"{name} = {value}", f'{name} = "{value}"'):
        found, left = conditions_in(text)
        if not left and [one.value for one in found] == [value]:
            return text
    return None


def _number(value: Any) -> float | None:
    if isinstance(value, bool):
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None
