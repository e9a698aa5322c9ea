"""Finds which modules made the input of an activation, and in which dimension their units are, during one
call of a model.

The units of a Linear are in the last dimension, those of a convolution in the second.
"""

from __future__ import annotations

import sys
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.autograd.graph import Node

__all__ = ["Origin", "Producers"]

_MOST_PRODUCERS = 1024
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


class Producers:
    """The modules of a model that show where units are, and their outputs during one call."""

    __slots__ = ("_in_last", "_nodes", "_tensors")

    def __init__(self, model: nn.Module) -> None:
        nn = sys.modules["torch"].nn
        last = (nn.Linear, nn.Bilinear, nn.Embedding)
        second = (nn.modules.conv._ConvNd, nn.modules.batchnorm._NormBase, nn.GroupNorm)
        shown = (
            (id(one), isinstance(one, last) or type(one).forward is nn.LayerNorm.forward)  # a subclass may differ
            for one in model.modules()
            if isinstance(one, (*last, *second)) or type(one).forward is nn.LayerNorm.forward
        )
        self._in_last = dict(islice(shown, _MOST_PRODUCERS))
        self._tensors: dict[int, tuple[ref[Tensor], Origin]] = {}
        self._nodes: dict[Node, Origin] = {}

    def note(self, module: nn.Module, output: Any) -> None:
        """The module has returned that."""
        last = self._in_last.get(id(module))
        if last is None or not isinstance(output, sys.modules["torch"].Tensor):
            return
        dimension: int | None = output.dim() - 1 if last else 1
        if output.dim() < 2 or (not last and output.dim() != len(getattr(module, "kernel_size", output.shape[2:])) + 2):
            dimension = None  # a single sample, without a batch dimension
        origin = Origin(dimension, frozenset((id(module),)))
        self._tensors[id(output)] = ref(output), origin
        if output.grad_fn is not None:
            self._nodes[output.grad_fn] = origin

    def origin(self, taken: Any, output: Tensor) -> Origin:
        """Returns the origin of an activation's input. taken, output: its input and output."""
        made = self._tensors.get(id(taken))
        tensor = None if made is None else made[0]()
        if made is not None and tensor is not None and tensor is taken and tensor.dim() == output.dim():
            return made[1]
        dimensions: set[int | None] = set()
        modules: frozenset[int] = frozenset()
        waiting = [output.grad_fn]
        for _ in range(_MOST_NODES):
            node = waiting.pop() if waiting else None
            if node is None:
                continue
            if node in self._nodes:
                dimensions.add(self._nodes[node].dimension)
                modules |= self._nodes[node].modules
            elif type(node).__name__.startswith(_KEEPS_SHAPE):
                waiting += [after for after, _ in node.next_functions]
        return Origin(dimensions.pop() if len(dimensions) == 1 else None, modules)
