"""Finds the tensors of a batch once, and reaches the same ones in later batches of the same structure.

Runs no code of the script's: a mapping that reads a file for each item is not asked.
"""

from __future__ import annotations

import sys
from collections import UserDict
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NamedTuple

__all__ = ["Path", "Place", "places_in", "reached"]

Path = tuple[tuple[Callable[[Any, Any], Any], Any], ...]
"""How to get from the batch to the tensor: in each container by which function, and under which key."""
_DEEPEST = 3
_MOST = 32


class Place(NamedTuple):
    """Where a tensor is. name: its key, or "" for an item of a sequence; outer: its position in the sequence, or -1."""

    name: str
    position: int
    path: Path
    tensor: Any


def places_in(batch: Any) -> list[Place]:
    """Returns the plain tensors in host memory that the batch holds, in its order; at most 32."""
    return [*islice(_places(batch, "", -1, ()), _MOST)]


def reached(batch: Any, path: Path) -> Any:
    """Returns the tensor at that place of another batch. Raises LookupError or TypeError where it has none."""
    for get, key in path:
        batch = get(batch, key)
    return batch


def _places(value: Any, name: str, position: int, path: Path) -> Iterator[Place]:
    torch: Any = sys.modules["torch"]
    kind = type(value)
    if kind is torch.Tensor:
        if value.is_cpu and not value.is_nested and value.layout is torch.strided and value.dim():
            yield Place(name, position, path, value)
        return
    if len(path) >= _DEEPEST:
        return
    if issubclass(kind, dict):
        for key in [*islice(dict.keys(value), _MOST)]:
            yield from _places(dict.get(value, key), str(key), -1, (*path, (dict.__getitem__, key)))
    elif issubclass(kind, UserDict):  # transformers' BatchEncoding
        held = vars(value).get("data")
        if type(held) is dict:
            yield from _places(held, name, position, (*path, (_attribute, "data")))
    elif issubclass(kind, (list, tuple)):
        get: Any = list.__getitem__ if issubclass(kind, list) else tuple.__getitem__
        fields = getattr(kind, "_fields", ())
        for at in range(min(len(value), _MOST)):
            yield from _places(get(value, at), fields[at] if at < len(fields) else "", at, (*path, (get, at)))
    elif isinstance(fields := getattr(kind, "__dataclass_fields__", None), dict):
        held = value.__dict__ if hasattr(value, "__dict__") else {}
        for field in [*islice((one for one in fields if one in held), _MOST)]:
            yield from _places(held[field], field, -1, (*path, (_attribute, field)))


def _attribute(value: Any, name: str) -> Any:
    return vars(value)[name]
