"""Finds the shape of a convolution's result and which of its gradients are computed, which torch's recording
does not contain.

Autograd's graph has both (flops/autograd_graph.py). For a convolution without a node in it (frozen layers, compiled
code), the shape of the result is searched for among the operators that follow.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

__all__ = ["FORWARD", "GRADIENTS", "NODES", "Convolution", "Sought", "convolution"]

FORWARD = frozenset(("aten::convolution", "aten::convolution_overrideable"))
GRADIENTS = "aten::convolution_backward"
NODES = frozenset(("ConvolutionBackward0", "ConvolutionOverrideableBackward0"))
_FAR = 32
"""Number of operators after a convolution among which to search for the one that takes its result."""


class Convolution(NamedTuple):
    """A convolution as a node of autograd's graph describes it. gradients: how many of input and weight get one."""

    out: tuple[int, ...]
    transposed: bool
    gradients: int

    def fits(self, x: Sequence[int], weight: Sequence[int]) -> bool:
        """True if it may have had these inputs. (Node numbers are not enough: each thread has its own.)"""
        channels = weight[0] == (x[1] if self.transposed else self.out[1])
        return channels and len(x) == len(self.out) and x[0] == self.out[0]


def convolution(x: Sequence[int], weight: Sequence[int], out: Sequence[int], transposed: bool | None) -> float:
    """Returns the floating-point operations of one pass. transposed: None if not known; the convolution then counts as
    transposed if its weight begins with the input's channels."""
    if transposed is None:
        transposed = weight[0] == x[1] != out[1]
    total = 2.0 * x[0]
    for size in (*(x if transposed else out)[2:], *weight):
        total *= size
    return total


class Sought:
    """A convolution whose result is searched for: in the next operator that takes a tensor of a fitting shape."""

    def __init__(self, x: tuple[int, ...], weight: tuple[int, ...]) -> None:
        self._x, self._weight = x, weight
        self._left = _FAR

    def result_in(self, shapes: Iterable[tuple[int, ...]]) -> tuple[int, ...] | None:
        """Returns the result's shape if it is one of these; empty if the search is over; None if it goes on."""
        x, weight = self._x, self._weight
        channels = weight[:2] if weight[0] == x[1] else weight[:1]  # the second one is for a transposed convolution
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
