"""Finds which modules made the input of an activation, and in which dimension their units are, during one
call of a model.

The units of a Linear are in the last dimension, those of a convolution in the second.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple
from weakref import ref

__all__ = ["Makers", "Origin", "makers_of"]

_MOST_MAKERS = 1024
"""Most modules whose outputs are recorded."""
_MOST_NODES = 16
_KEEPS_SHAPE = ("Add", "Sub", "Mul", "Div", "Relu", "Hardtanh", "Pow", "NativeDropout", "Clone", "ToCopy")
"""Beginnings of autograd's names of operations that leave the units where they were."""


class Origin(NamedTuple):
    """The origin of an activation's input.

    dimension: that of the units; None if not known.
    modules: ids of the modules that made the tensor or the parts that it is a sum of; empty if none is known. The same
        modules make the same units each time (a recurrent network).
    """

    dimension: int | None
    modules: frozenset[int]


def makers_of(model: Any) -> list[tuple[Any, bool]]:
    """Returns the modules that show where units are, with True if that is the last dimension and False if
    the second."""
    nn = sys.modules["torch"].nn
    last = (nn.Linear, nn.Bilinear, nn.Embedding)
    second = (nn.modules.conv._ConvNd, nn.modules.batchnorm._NormBase, nn.GroupNorm)
    found = []
    for module in model.modules():
        if isinstance(module, last) or type(module).forward is nn.LayerNorm.forward:  # a subclass may differ
            found.append((module, True))
        elif isinstance(module, second):
            found.append((module, False))
    return found[:_MOST_MAKERS]


class Makers:
    """The outputs of modules during one call, as tensors and as autograd's nodes."""

    __slots__ = ("_nodes", "_tensors")

    def __init__(self) -> None:
        self._tensors: dict[int, tuple[Any, Origin]] = {}
        self._nodes: dict[Any, Origin] = {}

    def note(self, last: bool, module: Any, _inputs: Any, output: Any) -> None:
        if not isinstance(output, sys.modules["torch"].Tensor):
            return
        dimension: int | None = output.dim() - 1 if last else 1
        if output.dim() < 2 or (not last and output.dim() != len(getattr(module, "kernel_size", output.shape[2:])) + 2):
            dimension = None  # a single sample, without a batch dimension
        origin = Origin(dimension, frozenset((id(module),)))
        self._tensors[id(output)] = ref(output), origin
        if output.grad_fn is not None:
            self._nodes[output.grad_fn] = origin

    def origin(self, taken: Any, output: Any) -> Origin:
        """Returns the origin of an activation's input. taken, output: its input and output."""
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
