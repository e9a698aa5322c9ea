"""Why torch.compile compiled again, counted and in words: from the events of the agent. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from perfagent_server.rules.evidence import one_line

__all__ = ["Compiled", "Kind", "compiled_functions"]

Kind = str
"""Of a reason: `sizes` (of a tensor), `values` (Python numbers, strings, lengths of lists), `other`."""
_SIZE = re.compile(r"tensor '(?P<tensor>.+?)' size mismatch at index (?P<index>\d+)\. expected (\d+), actual (\d+)")
_LENGTH = re.compile(r"len\((?P<of>.+)\) == (\d+)$")
_VALUE = re.compile(r"(?P<of>.+?) == (-?[\d.]+(?:e[+-]?\d+)?|True|False|'.*')$")
_MOST_NAMED = 3


@dataclass(slots=True)
class _Reason:
    kind: Kind
    words: str  # with {count} for the number of values
    values: set[str] = field(default_factory=set)
    times: int = 0

    def said(self) -> str:
        # a guard on a value tells the one that was expected; the newest is one more
        return self.words.format(count=max(2, len(self.values) + (self.kind == "values")))


@dataclass(frozen=True, slots=True)
class Compiled:
    """One function. times: how often it was compiled, with the first time; limit: 0 if it was not reached, -1 if its
    number is not known."""

    function: str
    line: str
    times: int
    seconds: float
    kind: Kind
    because: tuple[str, ...]
    limit: int

    def said(self) -> str:
        """`forward` (train.py:9) 8 times for 9 lengths of dimension 1 of `tokens`."""
        place = f" ({self.line})" if self.line else ""
        many = f"{self.times:,} times" if self.times > 1 else "once"
        return f"`{self.function}`{place} {many} {_joined(self.because)}".rstrip()


def compiled_functions(events: Sequence[dict[str, Any]]) -> list[Compiled]:
    """What these events tell, the function that was compiled most often first."""
    by_function: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for event in events:
        key = str(event.get("function") or "a function")[:100], str(event.get("line") or "")[:250]
        by_function.setdefault(key, []).append(event)
    found = [_compiled(*key, told) for key, told in by_function.items()]
    return sorted(found, key=lambda one: (not one.limit, -one.times))


def _compiled(function: str, line: str, events: list[dict[str, Any]]) -> Compiled:
    reasons: dict[str, _Reason] = {}
    for event in events:
        _count(str(event.get("reason") or ""), reasons)
    often = sorted(reasons.values(), key=lambda one: -one.times)
    limits = [event for event in events if event.get("limit_reached") is True]
    limit = limits[0].get("limit") if limits else 0
    return Compiled(
        function=function,
        line=line,
        times=1 + len(events) - len(limits),
        seconds=sum(_number(event.get("seconds")) for event in events),
        kind=often[0].kind,
        because=tuple(one.said() for one in often[:_MOST_NAMED]),
        limit=limit if isinstance(limit, int) else -1,
    )


def _count(reason: str, reasons: dict[str, _Reason]) -> None:
    size = _SIZE.search(reason)
    if size is not None:
        index, tensor = size["index"], _escaped(size["tensor"])
        one = _Reason("sizes", f"for {{count}} lengths of dimension {index} of `{tensor}`")
        values = {size[3], size[4]}
    elif (length := _LENGTH.match(reason)) is not None:
        one, values = _Reason("values", f"for {{count}} lengths of `{_escaped(length['of'])}`"), {length[2]}
    elif (value := _VALUE.match(reason)) is not None:
        one, values = _Reason("values", f"for {{count}} values of `{_escaped(value['of'])}`"), {value[2]}
    else:
        one, values = _Reason("other", f"because of `{_escaped(reason)}`" if reason else "for a reason unknown"), set()
    one = reasons.setdefault(one.words, one)
    one.values |= values
    one.times += 1


def _escaped(text: str) -> str:
    return one_line(text)[:120].replace("{", "{{").replace("}", "}}")


def _joined(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) and 0 <= value < 1e9 else 0.0
