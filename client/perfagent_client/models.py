"""From the server's JSON to the shapes of perfagent.wire; non-finite numbers arrive as text and leave as floats."""

from __future__ import annotations

import math
import types
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from perfagent.errors import WireError
from perfagent.wire import RunSummary

__all__ = ["RunDetails", "parse"]

T = TypeVar("T")


@dataclass(slots=True, kw_only=True)
class RunDetails(RunSummary):
    """One run as in GET /api/v1/runs/{run}: the summary and what people wrote about it."""

    notes: str = field(default="")


def parse(kind: type[T], data: Any) -> T:
    """A wire dataclass from JSON. Unknown fields are ignored, so that an older client reads a newer server's answers.

    Raises WireError when a field that is needed is missing or has another type.
    """
    if not isinstance(data, dict):
        raise WireError(f"the server's answer is no {kind.__name__}: {data!r:.200}")
    values = {}
    for name, annotation in _hints(kind).items():
        if name in data:
            values[name] = _convert(annotation, data[name])
    try:
        return kind(**values)
    except TypeError as error:
        raise WireError(f"the server's answer is no {kind.__name__}: {error}") from error


_known_hints: dict[type[Any], dict[str, Any]] = {}  # resolving them takes longer than a row of an export


def _hints(kind: type[Any]) -> dict[str, Any]:
    found = _known_hints.get(kind)
    if found is None:
        hints = get_type_hints(kind)
        found = _known_hints[kind] = {item.name: hints[item.name] for item in fields(kind)}
    return found


_SPELLED = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def _convert(annotation: Any, value: Any) -> Any:
    origin = get_origin(annotation)
    if annotation is float:
        return _number(value)
    if origin is list:
        item = get_args(annotation)[0]
        if not isinstance(value, list):
            raise WireError(f"the server's answer has {value!r:.80} where a list belongs")
        return [_convert(item, part) for part in value] if item is float or get_origin(item) is list else value
    if origin is dict:
        return _table(get_args(annotation)[1], value)
    if origin in (Union, types.UnionType):
        choices = get_args(annotation)
        if value is None and type(None) in choices:
            return None
        if float in choices and str not in choices:
            return _number(value)
    return value


def _table(kind: Any, value: Any) -> Any:
    """The values of a table by name: numbers and dataclasses are made; what is of no kind of ours stays as it came."""
    if not isinstance(value, dict):
        raise WireError(f"the server's answer has {value!r:.80} where a table belongs")
    if is_dataclass(kind) and isinstance(kind, type):
        return {name: parse(kind, item) for name, item in value.items()}
    return {name: _number(item) for name, item in value.items()} if kind is float else value


def _number(value: Any) -> float:
    if isinstance(value, str) and value in _SPELLED:
        return _SPELLED[value]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise WireError(f"the server's answer has {value!r:.80} where a number belongs")
    return float(value)
