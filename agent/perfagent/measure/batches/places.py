"""Finds the tensors of a batch once, and reaches the same ones in later batches of the same structure.

Runs no code of the script's: a mapping that reads a file for each item is not asked.
"""

from __future__ import annotations

import sys
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from types import MemberDescriptorType
from typing import TYPE_CHECKING, Any, NamedTuple

from perfagent.libraries import TENSOR_DICTS

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["TOKENS", "Path", "Place", "are_integers", "places_in", "reached"]

TOKENS = ("input_ids", "tokens", "token_ids", "idx", "inputs_ids", "decoder_input_ids")
"""Names of token ids, the likeliest first."""
Path = tuple[tuple[Callable[[Any, Any], Any], Any], ...]
"""How to get from the batch to the tensor: in each container by which function, and under which key."""
_DEEPEST = 4
_MOST, _MOST_OBJECTS = 32, 10_000


class Place(NamedTuple):
    """Where a tensor is. name: its key, or "" for an item of a sequence; position: in the sequence, or -1; label: its
    name with those of the containers around it."""

    name: str
    position: int
    label: str
    path: Path
    tensor: Tensor


def places_in(batch: object, left: Iterator[int] | None = None) -> list[Place]:
    """Returns the tensors of any kind that the batch holds, in its order; at most 32. left: ends after as many objects as
    are to be looked at."""
    return [*islice(_places(batch, "", -1, "", (), iter(range(_MOST_OBJECTS)) if left is None else left), _MOST)]


def reached(batch: object, path: Path) -> Any:
    """Returns what is at that place of another batch. Raises AttributeError, LookupError or TypeError where nothing is."""
    value: Any = batch
    for get, key in path:
        value = get(value, key)
    return value


def are_integers(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is sys.modules["torch"].bool)


def _places(
    value: Any, name: str, position: int, label: str, path: Path, left: Iterator[int]
) -> Iterator[Place]:  # fmt: skip
    kind = type(value)
    if issubclass(kind, sys.modules["torch"].Tensor):
        yield Place(name, position, label, path, value)
    elif len(path) >= _DEEPEST or next(left, None) is None:
        return
    elif issubclass(kind, dict):
        for key in [*islice(dict.keys(value), _MOST)]:
            inner = f"{label}.{key}".lstrip(".")
            yield from _places(dict.get(value, key), str(key), -1, inner, (*path, (dict.__getitem__, key)), left)
    elif issubclass(kind, (list, tuple)):
        get: Any = list.__getitem__ if issubclass(kind, list) else tuple.__getitem__
        fields = getattr(kind, "_fields", ())
        for at in range(min(len(value), _MOST)):
            inner = fields[at] if at < len(fields) else ""
            yield from _places(get(value, at), inner, at, inner or f"{label}[{at}]", (*path, (get, at)), left)
    else:
        for attribute in islice(_attributes(value, kind), _MOST):
            held, step = object.__getattribute__(value, attribute), (object.__getattribute__, attribute)
            inner = label if attribute in _WRAPPED and type(held) is dict else f"{label}.{attribute}".lstrip(".")
            yield from _places(held, attribute, -1, inner, (*path, step), left)


_WRAPPED = ("data", *TENSOR_DICTS.values())


def _attributes(value: Any, kind: type) -> Iterable[str]:
    """Names of the attributes in which an object holds a batch: it is a dataclass, or has tensors there."""
    held = object.__getattribute__(value, "__dict__") if kind.__dictoffset__ else {}
    if issubclass(kind, UserDict) or kind.__name__ in TENSOR_DICTS:  # BatchEncoding of transformers is a UserDict
        return [name for name in _WRAPPED if type(held.get(name)) is dict]
    if fields := getattr(kind, "__dataclass_fields__", ()):
        slots = [name for name in fields if type(getattr(kind, name, None)) is MemberDescriptorType]
        return [name for name in fields if name in held or (name in slots and hasattr(value, name))]
    tensor = sys.modules["torch"].Tensor
    return [*held] if type(held) is dict and any(isinstance(one, tensor) for one in held.values()) else []
