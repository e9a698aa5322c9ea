"""Whose units an activation gets, and in which dimension they are: said by the modules that made the tensor, in one call of a
model. The last dimension is that of a Linear's units, the second that of a convolution's."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple
from weakref import ref

__all__ = ["Makers", "Origin", "makers_of"]

_MOST_MAKERS = 1024
"""Modules of which it is noted what they made."""
_MOST_NODES = 16
_KEEPS_SHAPE = ("Add", "Sub", "Mul", "Div", "Relu", "Hardtanh", "Pow", "NativeDropout", "Clone", "ToCopy")
"""How autograd's names of operations begin behind which the units are where they were."""


class Origin(NamedTuple):
    """dimension: that of the units; None where it is not known. modules: the ids of those that made the tensor, or the parts that
    it is a sum of: the same ones make the same units each time (a recurrent network). None are known where it is empty."""

    dimension: int | None
    modules: frozenset[int]


def makers_of(model: Any) -> list[tuple[Any, bool]]:
    """The modules that say where units are, and whether that is the last dimension; else it is the second."""
    nn = sys.modules["torch"].nn
    last = (nn.Linear, nn.Bilinear, nn.Embedding)
    second = (nn.modules.conv._ConvNd, nn.modules.batchnorm._NormBase, nn.GroupNorm)
    found = []
    for module in model.modules():
        if isinstance(module, last) or type(module).forward is nn.LayerNorm.forward:  # a LayerNorm of its own may be of channels
            found.append((module, True))
        elif isinstance(module, second):
            found.append((module, False))
    return found[:_MOST_MAKERS]


class Makers:
    """What modules made in the course of one call, as tensors and as autograd's nodes."""

    __slots__ = ("_nodes", "_tensors")

    def __init__(self) -> None:
        self._tensors: dict[int, tuple[Any, Origin]] = {}
        self._nodes: dict[Any, Origin] = {}

    def note(self, last: bool, module: Any, _inputs: Any, output: Any) -> None:
        if not isinstance(output, sys.modules["torch"].Tensor):
            return
        dimension: int | None = output.dim() - 1 if last else 1
        if output.dim() < 2 or (not last and output.dim() != len(getattr(module, "kernel_size", output.shape[2:])) + 2):
            dimension = None  # one sample, without a dimension for more
        origin = Origin(dimension, frozenset((id(module),)))
        self._tensors[id(output)] = ref(output), origin
        if output.grad_fn is not None:
            self._nodes[output.grad_fn] = origin

    def origin(self, taken: Any, output: Any) -> Origin:
        """Of what an activation took and made."""
        made = self._tensors.get(id(taken))
        if made is not None and made[0]() is taken and taken.dim() == output.dim():
            return made[1]
        dimensions: set[int | None] = set()
        modules: frozenset[int] = frozenset()
        waiting = [output.grad_fn]
        for _ in range(_MOST_NODES):
            node = waiting.pop() if waiting else None
            if node in self._nodes:
                dimensions.add(self._nodes[node].dimension)
                modules |= self._nodes[node].modules
            elif node is not None and type(node).__name__.startswith(_KEEPS_SHAPE):
                waiting += [after for after, _ in node.next_functions if after is not None]
        return Origin(dimensions.pop() if len(dimensions) == 1 else None, modules)
