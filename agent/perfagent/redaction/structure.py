"""Removes secrets from nested data, and whatever MessagePack cannot carry: objects, cycles, endless sizes.

It may be handed what a training script is changing at this moment, so nothing here trusts it to hold still; and nothing
here calls code of the user's (no `__str__`, no properties): printing a tensor would wait for the device.
"""

from __future__ import annotations

import dataclasses
import enum
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType
from typing import Any

from perfagent.libraries import FIELDS, MODEL_CONFIGURATIONS, unresolved
from perfagent.redaction.names import HEX, HIDDEN, compiled, may_stay, noted, random_looking, secret_key, stands_for
from perfagent.redaction.remembered import learn, learn_environment
from perfagent.redaction.text import redacted_arguments, redacted_lines, redacted_text

__all__ = ["Versions", "redacted"]

MAX_ITEMS = 2_000
MAX_DEPTH = 12
MAX_ALL = 20_000
"""Values in one structure, all levels together."""
_PRINTABLE = frozenset((
    "datetime.datetime", "datetime.date", "datetime.timedelta", "uuid.UUID", "decimal.Decimal", "fractions.Fraction",
    "builtins.range", "builtins.complex", "torch.device", "torch.dtype", "torch.Size", "torch.memory_format", "torch.layout",
))  # fmt: skip
"""Types whose text costs nothing and says all."""
_RECORDS = frozenset(("Namespace", "SimpleNamespace", *MODEL_CONFIGURATIONS))
"""Classes, by name, whose objects are no more than their attributes."""
_OF_PAIRS = frozenset(("opt", "opts", "set", "override", "overrides", "cfg-options", "cfg_options"))
"""Lists in which names and values take turns, as yacs and mmengine have them."""


class Versions(dict[str, str]):
    """Package -> version: the name of a package, as authlib, makes no secret of its version."""


def redacted(value: Any) -> Any:
    """Copies a structure without secrets; large ones are shortened, objects become their fields or the name of their
    type."""
    learn_environment()
    return _Walk().value(value)


class _Walk:
    """One structure; `room` is what it may still grow by."""

    def __init__(self) -> None:
        self.room = MAX_ALL

    def value(self, value: Any, above: tuple[str, ...] = ()) -> Any:
        """above: what the value and all that hold it are called, "" in a list."""
        self.room -= 1
        kind = type(value)
        if value is None or kind is bool or kind is float:
            return value
        try:
            return self._other(value, above)
        except Exception:  # noqa: BLE001 - somebody else's object, or a dict that another thread is changing
            return f"[{kind.__name__}]"

    def _other(self, value: Any, above: tuple[str, ...]) -> Any:
        kind = type(value)
        if isinstance(value, enum.Enum):
            return self.value(value.value, above) if isinstance(value.value, (str, int, float)) else str(value.name)
        if isinstance(value, str):
            return HIDDEN if random_looking(value) else redacted_text(str.__str__(value))
        if isinstance(value, int):
            number = int.__int__(value)
            shown = f"[an integer of {number.bit_length()} bits]" if number.bit_length() > 300 else str(number)
            return number if -(2**63) <= number < 2**63 else shown
        if isinstance(value, PurePath):
            return redacted_text(str(value))
        if isinstance(value, (bytes, bytearray, memoryview)):
            return f"[{len(value)} bytes]"
        if len(above) >= MAX_DEPTH or self.room <= 0:
            return f"[{kind.__name__}]"
        value = unresolved(value)
        if isinstance(value, Mapping):
            return self._mapping(value, above)
        if isinstance(value, tuple) and hasattr(kind, "_fields"):
            return self._mapping(dict(zip(kind._fields, value, strict=False)), above)
        if isinstance(value, (list, tuple, set, frozenset)):
            return self._items(value, above)
        if isinstance(value, (type, FunctionType, BuiltinFunctionType)):
            return f"{value.__module__}.{value.__qualname__}".removeprefix("builtins.")
        return self._object(value, above)

    def _mapping(self, value: Mapping[Any, Any], above: tuple[str, ...]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        everything = list(value.items())
        for key, item in everything:
            if len(result) >= MAX_ITEMS or self.room <= 0:
                result["..."] = f"{len(value) - len(result)} more"
                break
            plain = str(key) if isinstance(key, (str, int, float, enum.Enum, type(None))) else type(key).__name__
            named = not isinstance(value, Versions)
            shown = self._named(plain, item, everything, above) if named else self.value(item, (*above, plain))
            result[redacted_text(plain)[:256]] = shown
        return result

    def _named(self, name: str, item: Any, siblings: list[tuple[Any, Any]], above: tuple[str, ...]) -> Any:
        """What stands under a name, without a secret."""
        if name in ("value", "Value"):  # {"name": "HF_TOKEN", "value": X}, as Kubernetes lists variables
            names = (word for key, word in siblings if key in ("name", "Name", "key", "Key") and isinstance(word, str))
            name = next(names, name) or name
        if isinstance(item, str):
            text = str.__str__(item)
            shown = HIDDEN if _logs_in(name, text, siblings, above) else stands_for(name, text)
            if shown == HIDDEN:
                learn(name, text, digits=False)
            return self.value(item, (*above, name)) if shown is None else redacted_text(shown)
        if noted(name) and _hides(name, item):
            return HIDDEN
        if name == "lines" and isinstance(item, list) and any(isinstance(line, str) for line in item):  # of output
            return redacted_lines(line for line in item if isinstance(line, str))
        return self.value(item, (*above, name))

    def _items(self, value: Iterable[Any], above: tuple[str, ...]) -> list[Any]:
        everything = list(value)
        kept, within = everything[: min(MAX_ITEMS, max(0, self.room))], (*above, "")
        if any(isinstance(item, str) for item in kept):
            pairs = len(everything) == 2 or not _OF_PAIRS.isdisjoint(above[-1:])
            items = self._words(kept, within, pairs=pairs)
        else:
            items = [self.value(item, within) for item in kept if self.room > 0]
        return items if len(items) == len(everything) else [*items, f"{len(everything) - len(items)} more"]

    def _words(self, listed: list[Any], above: tuple[str, ...], *, pairs: bool) -> list[Any]:
        """Any list with texts may be a command line or a part of one. pairs: names and values take turns."""
        words = [
            str.__str__(item) if isinstance(item, str) else str(item) if type(item) in (int, float) else "\x02"
            for item in listed
        ]
        items: list[Any] = []
        before = ""
        for item, word, shown in zip(listed, words, redacted_arguments(words), strict=True):
            if (pairs and _hides(before, item)) or (shown == HIDDEN and not isinstance(item, str)):  # --password 4711
                items.append(HIDDEN)
            elif type(item) is str:
                self.room -= 1
                items.append(shown)
            elif self.room > 0:
                items.append(self.value(item, above))
            before = "" if "=" in word or word.startswith("-") else word
        return items

    def _object(self, value: Any, above: tuple[str, ...]) -> Any:
        """What has fields becomes a dict of them; of all else only the name of the type stays."""
        kind = type(value)
        if f"{kind.__module__}.{kind.__qualname__}" in _PRINTABLE:
            return redacted_text(str(value))
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, numpy.generic):
            return self.value(value.item(), above)
        own = getattr(value, "__dict__", None)
        if dataclasses.is_dataclass(kind):
            fields = [field.name for field in dataclasses.fields(kind)]
            held = own if isinstance(own, dict) else {name: getattr(value, name) for name in fields}  # slots
            return self._mapping({name: held[name] for name in fields if name in held}, above)
        if isinstance(own, dict) and not _RECORDS.isdisjoint(base.__name__ for base in kind.__mro__):
            return self._mapping({name: item for name, item in own.items() if not name.startswith("_")}, above)
        if isinstance(own, dict) and any(hasattr(kind, name) for name in FIELDS):
            return self._mapping(own, above)
        return f"[{kind.__name__}]"


def _hides(key: str, item: Any) -> bool:
    """Whether the value under this name is left out. Numbers and switches stay, unless they may be a password."""
    if isinstance(item, str):
        return stands_for(key, item) == HIDDEN
    if item is None or isinstance(item, bool) or not secret_key(key):
        return False
    return not (isinstance(item, (int, float)) and may_stay(key, str(item)))


def _logs_in(name: str, text: str, siblings: list[tuple[Any, Any]], above: tuple[str, ...]) -> bool:
    """Whether this is a key of W&B, which is as long as a commit: `{"wandb": {"key": X}}`, `{"name": "wandb", "key":
    X}`, `{"username": "me", "key": X}` of kaggle.json."""
    if compiled(HEX).fullmatch(text) is None or compiled(r"(?i)(?:^|[._-])(?:key|api)$").search(name) is None:
        return False
    beside = " ".join([*above, *(word for pair in siblings for word in pair if isinstance(word, str))])
    return compiled("wandb|login|username", re.IGNORECASE).search(beside) is not None
