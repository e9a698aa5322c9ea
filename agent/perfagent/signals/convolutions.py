"""What a convolution's result was, and which of its gradients are computed: torch's recording of operators says neither.

Autograd's graph does (graph.py). Where there is no node of it (frozen layers, compiled code), the shape of the result is looked
for among the operators that follow.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

__all__ = ["FORWARD", "GRADIENTS", "NODES", "Convolution", "Sought", "convolution"]

FORWARD = frozenset(("aten::convolution", "aten::convolution_overrideable"))
GRADIENTS = "aten::convolution_backward"
NODES = frozenset(("ConvolutionBackward0", "ConvolutionOverrideableBackward0"))
_FAR = 32
"""Operators after a convolution among which is the one that takes its result."""


class Convolution(NamedTuple):
    """One as a node of autograd's graph tells of it. gradients: of input and weight, how many are computed."""

    out: tuple[int, ...]
    transposed: bool
    gradients: int

    def fits(self, x: Sequence[int], weight: Sequence[int]) -> bool:
        """Whether it may have been given these. Numbers of nodes are each thread's own."""
        channels = weight[0] == (x[1] if self.transposed else self.out[1])
        return channels and len(x) == len(self.out) and x[0] == self.out[0]


def convolution(x: Sequence[int], weight: Sequence[int], out: Sequence[int], transposed: bool | None) -> float:
    """Floating-point operations of one pass. transposed: None where it is not known; it is one then whose weight begins with the
    channels of the input."""
    if transposed is None:
        transposed = weight[0] == x[1] != out[1]
    total = 2.0 * x[0]
    for size in (*(x if transposed else out)[2:], *weight):
        total *= size
    return total


class Sought:
    """One whose result's shape is looked for: in the next operator that takes something of its kind."""

    def __init__(self, x: tuple[int, ...], weight: tuple[int, ...]) -> None:
        self._x, self._weight = x, weight
        self._left = _FAR

    def result_in(self, shapes: Iterable[tuple[int, ...]]) -> tuple[int, ...] | None:
        """The result's shape if it is one of these; empty where it will not be found, None where it may be yet."""
        x, weight = self._x, self._weight
        channels = weight[:2] if weight[0] == x[1] else weight[:1]  # the second is a transposed one's
        for shape in shapes:
            if len(shape) != len(x):
                continue
            if shape == x:
                if weight[0] == x[1]:
                    return shape
            elif shape[0] == x[0] and shape[1] in channels:
                return shape
        self._left -= 1
        return None if self._left else ()
