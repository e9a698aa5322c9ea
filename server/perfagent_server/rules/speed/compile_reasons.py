"""Why torch.compile compiled again, counted: from the events of the agent. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from perfagent_server.rules.evidence import one_line

__all__ = ["Compiled", "Kind", "compiled_functions"]

Kind = str
"""Of a reason: `sizes` (of a tensor), `values` (Python numbers, strings, lengths of lists), `other`."""
_SIZE = re.compile(r"tensor '(?P<tensor>.+?)' size mismatch at index (?P<index>\d+)\. expected (\d+), actual (\d+)")
_LENGTH = re.compile(r"len\((?P<of>.+)\) == (\d+)$")
_VALUE = re.compile(r"(?P<of>.+?) == (-?[\d.]+(?:e[+-]?\d+)?|True|False|'.*')$")
_KINDS = {"lengths of a dimension": "sizes", "lengths": "values", "values": "values"}
_MOST_NAMED = 3


class _Reason(NamedTuple):
    """kind: of its sentence; of: what it is about, "" where no reason is told; dimension: of a tensor."""

    kind: str
    of: str
    dimension: int | None = None


@dataclass(frozen=True, slots=True)
class Compiled:
    """One function. times: how often it was compiled, with the first time; because: the reasons as figures, the most
    frequent first; limit: 0 if it was not reached, -1 if its number is not known."""

    function: str
    line: str
    times: int
    seconds: float
    kind: Kind
    because: tuple[dict[str, Any], ...]
    limit: int

    @property
    def figures(self) -> dict[str, Any]:
        return {
            "kind": "gave up" if self.limit else "compiled", "function": self.function, "line": self.line,
            "times": self.times, "seconds": self.seconds, "because": [*self.because], "limit_reached": bool(self.limit),
        }  # fmt: skip


def compiled_functions(events: Sequence[dict[str, Any]]) -> list[Compiled]:
    """What these events tell, the function that was compiled most often first."""
    by_function: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for event in events:
        key = str(event.get("function") or "?")[:100], str(event.get("line") or "")[:250]
        by_function.setdefault(key, []).append(event)
    found = [_compiled(*key, told) for key, told in by_function.items()]
    return sorted(found, key=lambda one: (not one.limit, -one.times))


def _compiled(function: str, line: str, events: list[dict[str, Any]]) -> Compiled:
    values: dict[_Reason, set[str]] = {}
    times: Counter[_Reason] = Counter()
    for event in events:
        one, of_it = _reason(str(event.get("reason") or ""))
        values.setdefault(one, set()).update(of_it)
        times[one] += 1
    often = [one for one, _ in times.most_common()]
    limits = [event for event in events if event.get("limit_reached") is True]
    limit = limits[0].get("limit") if limits else 0
    return Compiled(
        function=function,
        line=line,
        times=1 + len(events) - len(limits),
        seconds=sum(_number(event.get("seconds")) for event in events),
        kind=_KINDS.get(often[0].kind, "other"),
        because=tuple(_figures(one, values[one]) for one in often[:_MOST_NAMED] if one.of),
        limit=limit if isinstance(limit, int) else -1,
    )


def _reason(reason: str) -> tuple[_Reason, set[str]]:
    """With the values that it tells."""
    size = _SIZE.search(reason)
    if size is not None:
        return _Reason("lengths of a dimension", _short(size["tensor"]), int(size["index"])), {size[3], size[4]}
    length, value = _LENGTH.match(reason), _VALUE.match(reason)
    if length is not None:
        return _Reason("lengths", _short(length["of"])), {length[2]}
    if value is not None:
        return _Reason("values", _short(value["of"])), {value[2]}
    return _Reason("guard", _short(reason)), set()


def _figures(reason: _Reason, values: set[str]) -> dict[str, Any]:
    if reason.kind == "guard":
        return {"kind": reason.kind, "of": reason.of}
    # a guard on a value tells the one that was expected; the newest is one more
    count = max(2, len(values) + (reason.dimension is None))
    dimension = {} if reason.dimension is None else {"dimension": reason.dimension}
    return {"kind": reason.kind, "count": count, "of": reason.of, **dimension}


def _short(text: str) -> str:
    return one_line(text)[:120]


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) and 0 <= value < 1e9 else 0.0
