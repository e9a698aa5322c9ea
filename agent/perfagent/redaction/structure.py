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

from perfagent.redaction.arguments import TAKES_PAIRS, CommandLine, redacted_arguments
from perfagent.redaction.names import HEX, HIDDEN, compiled, may_stay, noted, random_looking, secret_key, stands_for
from perfagent.redaction.remembered import learn, learn_environment
from perfagent.redaction.text import redacted_lines, redacted_text

__all__ = ["Versions", "redacted"]

MAX_ITEMS = 2_000
MAX_DEPTH = 12
MAX_ALL = 20_000
"""Values in one structure, all levels together."""
_PRINTABLE = {
    ("datetime", "datetime"), ("datetime", "date"), ("datetime", "timedelta"), ("uuid", "UUID"), ("decimal", "Decimal"),
    ("fractions", "Fraction"), ("builtins", "range"), ("builtins", "complex"), ("torch", "device"), ("torch", "dtype"),
    ("torch", "Size"), ("torch", "memory_format"), ("torch", "layout"),
}  # fmt: skip
"""Types whose text costs nothing and says all."""
_RECORDS = frozenset(("Namespace", "SimpleNamespace", "PretrainedConfig", "PreTrainedConfig"))
"""Classes, by name, whose objects are no more than their attributes."""
_KEY = r"(?:^|[._-])(?:key|api)$"


class Versions(dict[str, str]):
    """Package -> version: the name of a package, as authlib, makes no secret of its version."""


def redacted(value: Any) -> Any:
    """The same structure without secrets; large ones are shortened, objects become their fields or the name of their
    type."""
    learn_environment()
    return _Walk().value(value, 0)


class _Walk:
    """One structure; `room` is what it may still grow by, `login` whether a name above the value speaks of W&B or of a
    login."""

    def __init__(self) -> None:
        self.room = MAX_ALL
        self.login = False

    def value(self, value: Any, depth: int) -> Any:
        self.room -= 1
        if value is None or value is True or value is False:
            return value
        kind = type(value)
        if kind is str:
            return HIDDEN if random_looking(value) else redacted_text(value)
        if kind is float:
            return value
        if kind is int:
            if -(2**63) <= value < 2**63:
                return value
            return f"[an integer of {value.bit_length()} bits]" if value.bit_length() > 300 else str(value)
        try:
            return self._other(value, depth)
        except Exception:  # noqa: BLE001 - somebody else's object, or a dict that another thread is changing
            return f"[{kind.__name__}]"

    def _other(self, value: Any, depth: int) -> Any:
        kind = type(value)
        if isinstance(value, enum.Enum):
            return self.value(value.value, depth + 1) if isinstance(value.value, (str, int, float)) else str(value.name)
        if isinstance(value, str):
            return redacted_text(str.__str__(value))
        if isinstance(value, float):
            return float.__float__(value)
        if isinstance(value, int):
            return self.value(int.__int__(value), depth)
        if isinstance(value, PurePath):
            return redacted_text(str(value))
        if isinstance(value, (bytes, bytearray, memoryview)):
            return f"[{len(value)} bytes]"
        if depth >= MAX_DEPTH or self.room <= 0:
            return f"[{kind.__name__}]"
        # as it is written: resolving runs code, and reads secrets from elsewhere
        if kind.__module__.startswith("omegaconf."):
            value = sys.modules["omegaconf"].OmegaConf.to_container(value, resolve=False)
        if isinstance(value, Mapping):
            return self._mapping(value, depth)
        if isinstance(value, tuple) and hasattr(kind, "_fields"):
            return self._mapping(dict(zip(kind._fields, value, strict=False)), depth)
        if isinstance(value, (list, tuple, set, frozenset)):
            return self._items(value, depth)
        if isinstance(value, (type, FunctionType, BuiltinFunctionType)):
            return f"{value.__module__}.{value.__qualname__}".removeprefix("builtins.")
        return self._object(value, depth)

    def _mapping(self, value: Mapping[Any, Any], depth: int) -> dict[str, Any]:
        result: dict[str, Any] = {}
        everything = list(value.items())
        for key, item in everything:
            if len(result) >= MAX_ITEMS or self.room <= 0:
                result["..."] = f"{len(value) - len(result)} more"
                break
            plain = str(key) if isinstance(key, (str, int, float, enum.Enum, type(None))) else type(key).__name__
            named = not isinstance(value, Versions)
            shown = self._named(plain, item, everything, depth) if named else self.value(item, depth + 1)
            result[redacted_text(plain)[:256]] = shown
        return result

    def _named(self, name: str, item: Any, siblings: list[tuple[Any, Any]], depth: int) -> Any:
        """What stands under a name, without a secret."""
        if name in ("value", "Value"):  # {"name": "HF_TOKEN", "value": X}, as Kubernetes lists variables
            names = (word for key, word in siblings if key in ("name", "Name", "key", "Key") and isinstance(word, str))
            name = next(names, name) or name
        if isinstance(item, str):
            text = str.__str__(item)
            shown = HIDDEN if self._logs_in(name, text, siblings) else stands_for(name, text)
            if shown == HIDDEN:
                learn(name, text, digits=False)
            return self.value(item, depth + 1) if shown is None else redacted_text(shown)
        if noted(name) and _hides(name, item):
            return HIDDEN
        if name in ("command", "argv") and isinstance(item, (list, tuple)):
            return redacted_arguments(word for word in item if isinstance(word, str))
        if name == "lines" and isinstance(item, list) and any(isinstance(line, str) for line in item):  # of output
            return redacted_lines(line for line in item if isinstance(line, str))
        if name in TAKES_PAIRS and type(item) in (list, tuple):
            return self._items(item, depth + 1, pairs=True)
        outer, self.login = self.login, self.login or _speaks_of_a_login(name)
        try:
            return self.value(item, depth + 1)
        finally:
            self.login = outer

    def _logs_in(self, name: str, text: str, siblings: list[tuple[Any, Any]]) -> bool:
        """Whether this is a key of W&B, which is as long as a commit: `{"wandb": {"key": X}}`, `{"name": "wandb",
        "key": X}`."""
        if compiled(HEX).fullmatch(text) is None or compiled(_KEY, re.IGNORECASE).search(name) is None:
            return False
        words = [word for pair in siblings for word in pair if isinstance(word, str)]
        return self.login or "username" in words or any(map(_speaks_of_a_login, words))  # kaggle.json has a username

    def _items(self, value: Iterable[Any], depth: int, *, pairs: bool = False) -> list[Any]:
        everything = list(value)
        first = everything[0] if len(everything) == 2 else None
        if isinstance(first, str) and not first.startswith("-") and "=" not in first and _hides(*everything):
            return [self.value(first, depth + 1), HIDDEN]  # as lists of headers have them
        line = None if isinstance(value, (set, frozenset)) else CommandLine(everything, pairs=pairs)
        items: list[Any] = []
        for item in everything[:MAX_ITEMS]:
            if self.room <= 0:
                break
            items.append(self.value(item, depth + 1) if line is None else self._word(line, item, depth))
        return items if len(items) == len(everything) else [*items, f"{len(everything) - len(items)} more"]

    def _word(self, line: CommandLine, item: Any, depth: int) -> Any:
        """One of a list: any list of strings may be a command line, or a part of one."""
        if isinstance(item, str) and not isinstance(item, enum.Enum):
            self.room -= 1
            return line.word(str.__str__(item))
        name = line.name()
        return HIDDEN if name and _hides(name, item) else self.value(item, depth + 1)

    def _object(self, value: Any, depth: int) -> Any:
        """What has fields becomes a dict of them; of all else only the name of the type stays."""
        kind = type(value)
        if (kind.__module__, kind.__qualname__) in _PRINTABLE:
            return redacted_text(str(value))
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, numpy.generic):
            return self.value(value.item(), depth + 1)
        own = getattr(value, "__dict__", None)
        if dataclasses.is_dataclass(kind):
            names = [field.name for field in dataclasses.fields(kind)]
            if isinstance(own, dict):
                return self._mapping({name: own[name] for name in names if name in own}, depth)
            return self._mapping({name: getattr(value, name) for name in names}, depth)  # slots
        if isinstance(own, dict) and not _RECORDS.isdisjoint(base.__name__ for base in kind.__mro__):
            return self._mapping({name: item for name, item in own.items() if not name.startswith("_")}, depth)
        # pydantic, attrs
        if isinstance(own, dict) and (hasattr(kind, "model_fields") or hasattr(kind, "__attrs_attrs__")):
            return self._mapping(own, depth)
        return f"[{kind.__name__}]"


def _hides(key: str, item: Any) -> bool:
    """Whether the value under this name is left out. Numbers and switches stay, unless they may be a password."""
    if isinstance(item, str):
        return stands_for(key, item) == HIDDEN
    if item is None or isinstance(item, bool) or not secret_key(key):
        return False
    return not (isinstance(item, (int, float)) and may_stay(key, str(item)))


def _speaks_of_a_login(word: str) -> bool:
    lower = word.lower()
    return "wandb" in lower or "login" in lower
