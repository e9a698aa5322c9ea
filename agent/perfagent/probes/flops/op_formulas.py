"""Counts floating-point operations by the names of operators and the shapes of their inputs.

torch.utils.flop_counter has no formula for vectors, experts and several fused products, and imports triton.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod

from perfagent.measure.flops.op import CONVOLUTIONS, GRADIENTS, PRODUCTS, Op, Shape

__all__ = ["Counted", "causal_share", "count"]


@dataclass(slots=True)
class Counted:
    """The floating-point operations of one step.

    products: matrix products and convolutions. attention: scores and weighted values, where one kernel computes both.
    unknown: names of operators whose arithmetic is not known; the figures are then too low.
    kind: the dtype in which most of it is multiplied; empty if not known.
    """

    products: float = 0.0
    attention: float = 0.0
    unknown: set[str] = field(default_factory=set)
    kind: str = ""

    @property
    def total(self) -> float:
        return self.products + self.attention

    def __add__(self, other: Counted) -> Counted:
        products, attention = self.products + other.products, self.attention + other.attention
        return Counted(products, attention, self.unknown | other.unknown)


def _product(a: Shape, b: Shape) -> float:
    """Product of two matrices, a matrix and a vector, or as many pairs as the first dimension says. In a product of groups
    (experts) one factor has no dimension for them: all of it counts."""
    pairs = a[0] if len(a) == len(b) == 3 else 1
    return 2.0 * pairs * a[-2] * a[-1] * (b[-1] if len(b) > 1 else 1)


def _convolution(x: Shape, weight: Shape, out: Shape, transposed: bool | None) -> float:
    """One pass. Where it is not known, a convolution counts as transposed if its weight begins with the input's channels."""
    if transposed is None:
        transposed = weight[0] == x[1] != out[1]
    return 2.0 * x[0] * prod((x if transposed else out)[2:]) * prod(weight)


def _attention(query: Shape, key: Shape, value: Shape) -> float:
    """Scores and weighted values of one forward pass, for all pairs of positions."""
    batch, heads, length, width = query
    return 2.0 * batch * heads * length * key[2] * (width + value[3])


def causal_share(length: int, keys: int) -> float:
    """Returns the share of position pairs that causal attention needs, with its mask beginning at the upper left."""
    short = min(length, keys)
    return (short * (short + 1) // 2 + (length - short) * keys) / (length * keys)


def count(ran: Mapping[Op, int], unknown: Iterable[str] = ()) -> Counted:
    """Counts all operators that ran. unknown: names of others that ran."""
    counted = Counted(unknown=set(unknown))
    for op, times in ran.items():
        try:
            flops = times * _flops(op)
        except (IndexError, ValueError):  # a convolution's result is not known, or torch recorded no shapes
            counted.unknown.add(op.name)
            continue
        if op.attends:
            counted.attention += flops
        else:
            counted.products += flops
    return counted


def _flops(op: Op) -> float:
    if op.name in PRODUCTS:
        place = PRODUCTS[op.name]
        return _product(*op.shapes[place : place + 2])
    if op.name in CONVOLUTIONS:
        x, weight, out = op.shapes
        return _convolution(x, weight, out, op.transposed)
    if op.name == GRADIENTS:
        out, x, weight = op.shapes
        return op.gradients * _convolution(x, weight, out, op.transposed)
    query, key, value = op.attended
    share = causal_share(query[-2], key[-2]) if op.causal else 1.0
    return _attention(query, key, value) * share * (2 if op.is_gradient else 1)
