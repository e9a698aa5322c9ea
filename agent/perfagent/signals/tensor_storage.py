"""What a tensor is made of, and which tensors an optimizer keeps: for whoever adds up memory. Nothing is read or computed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from perfagent.signals.sharding import local

__all__ = ["every_optimizer", "is_lazy", "made_of", "numbers_in", "tensors_in"]

_DEEPEST = 4


def every_optimizer(progress: Any, primary: Any) -> list[Any]:
    """The one whose steps count, and those that step beside it (a discriminator's, one for the embeddings)."""
    others = [one() for one in list(progress.beside.values())]
    return [primary, *(other for other in others if other is not None and other is not primary)]


def tensors_in(value: Any, depth: int = 0) -> Iterator[Any]:
    """What an optimizer keeps of a parameter: tensors by name, in lists (LBFGS, SOAP), by name once more (Shampoo); and whatever
    else is kept there."""
    if isinstance(value, (dict, list, tuple)):
        if depth < _DEEPEST:
            for part in list(value.values() if isinstance(value, dict) else value):
                yield from tensors_in(part, depth + 1)
    else:
        yield value


def is_lazy(tensor: Any) -> bool:
    """A parameter of a module that was not called yet: it has no size."""
    return isinstance(tensor, sys.modules["torch"].nn.parameter.UninitializedTensorMixin)


def numbers_in(parameter: Any) -> int:
    """How many numbers this rank holds of it; 0 of one that has no size yet."""
    return 0 if is_lazy(parameter) else int(local(parameter).numel())


def made_of(tensor: Any) -> list[Any]:
    """The tensors that hold its numbers: of a sharded one our part, of one with codes and scales (8-bit state) these."""
    tensor = local(tensor)
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return [tensor]
    held = [getattr(tensor, name) for name in flatten()[0]]  # a mesh may be among them
    return [part for one in held if isinstance(one, sys.modules["torch"].Tensor) for part in made_of(one)]
