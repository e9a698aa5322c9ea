"""Finds the tensors that a tensor consists of and those that an optimizer keeps, to add up memory. Reads and
computes nothing."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from perfagent.measure.sharding import local

__all__ = ["is_lazy", "made_of", "numbers_in", "tensors_in"]

_DEEPEST = 4


def tensors_in(value: Any, depth: int = 0) -> Iterator[Any]:
    """Yields what an optimizer keeps for a parameter: tensors by name, in lists (LBFGS, SOAP), by a second name
    (Shampoo), and everything else there."""
    if isinstance(value, (dict, list, tuple)):
        if depth < _DEEPEST:
            for part in list(value.values() if isinstance(value, dict) else value):
                yield from tensors_in(part, depth + 1)
    else:
        yield value


def is_lazy(tensor: Any) -> bool:
    """True for a parameter of a module that was not called yet: it has no size."""
    return isinstance(tensor, sys.modules["torch"].nn.parameter.UninitializedTensorMixin)


def numbers_in(parameter: Any) -> int:
    """Returns how many numbers of a parameter this rank holds; 0 if it has no size yet."""
    return 0 if is_lazy(parameter) else int(local(parameter).numel())


def made_of(tensor: Any) -> list[Any]:
    """Returns the tensors that hold its numbers: our part of a sharded tensor, the codes and scales of an 8-bit one."""
    tensor = local(tensor)
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return [tensor]
    held = [getattr(tensor, name) for name in flatten()[0]]  # may include a mesh
    return [part for one in held if isinstance(one, sys.modules["torch"].Tensor) for part in made_of(one)]
