"""What docs/reference/commands.md says that `--json` prints, and whether something is so."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import datetime
from functools import cache
from typing import Any

from documents import ROOT

_HEADING = re.compile(r"^### (?P<title>[^\n]+)\n.*?^```json\n(?P<shape>.*?)^```", re.MULTILINE | re.DOTALL)
_NOT_FINITE = ("NaN", "Infinity", "-Infinity")


@cache
def shapes() -> dict[str, Any]:
    """By command ("alerts ack"), and by name ("Run")."""
    found: dict[str, Any] = {}
    for title, text in _HEADING.findall((ROOT / "docs" / "reference" / "commands.md").read_text("utf-8")):
        first, *others = title.removeprefix("perfagent ").split(", ")
        before = first.rpartition(" ")[0]
        for name in (first, *(f"{before} {one}" for one in others)):
            found[name] = json.loads(text)
    return found


def differences(value: Any, shape: Any, place: str = "") -> Iterator[str]:
    """Where a value is not as a shape says, and how."""
    if isinstance(shape, str):
        yield from _of_word(value, shape, place)
    elif isinstance(shape, list):
        if not isinstance(value, list):
            yield f"{place} is no list: {value!r}"
            return
        for at, item in enumerate(value):
            yield from differences(item, shape[0], f"{place}[{at}]")
    elif not isinstance(value, dict):
        yield f"{place} is no object: {value!r}"
    elif "*" in shape:
        for name, item in value.items():
            yield from differences(item, shape["*"], f"{place}.{name}")
    else:
        yield from _of_fields(value, shape, place)


def _of_fields(value: dict[str, Any], shape: dict[str, Any], place: str) -> Iterator[str]:
    fields = whole(shape)
    allowed = {name.removesuffix("?"): of for name, of in fields.items()}
    yield from (f"{place}.{name} is missing" for name in fields if not name.endswith("?") and name not in value)
    for name, item in value.items():
        if name in allowed:
            yield from differences(item, allowed[name], f"{place}.{name}")
        else:
            yield f"{place}.{name} is not in docs/reference/commands.md"


def whole(shape: dict[str, Any]) -> dict[str, Any]:
    """The fields of an object, with those of the shapes that it names."""
    fields: dict[str, Any] = {}
    for name, of in shape.items():
        fields |= whole(shapes()[name[3:]]) if name.startswith("...") else {name: of}
    return fields


def _of_word(value: Any, word: str, place: str) -> Iterator[str]:
    kind, _, null = word.partition(" ")
    if (value is None and null == "null") or kind == "any":
        return
    if kind[0].isupper():
        yield from differences(value, shapes()[kind], place)
    elif not _is(value, kind):
        yield f"{place} is not {word}: {value!r}"


def _is(value: Any, kind: str) -> bool:
    if kind == "time":
        return isinstance(value, str) and datetime.fromisoformat(value).tzinfo is not None
    if kind == "number":
        return (isinstance(value, (int, float)) and not isinstance(value, bool)) or value in _NOT_FINITE
    types: dict[str, type] = {"text": str, "bool": bool, "whole": int}
    return isinstance(value, types[kind]) and (kind == "bool" or not isinstance(value, bool))
