"""The operators of one step as torch recorded them, and what they compute: floating-point operations by formula.

One step of a model with 300 tensors leaves 26,000 events. Read in one go they would keep the sender's thread from its tick, and
the training thread from the interpreter, so they are read some hundred at a time, and each is let go once it was read: it holds
native memory. What is left of them is how often each operator that computes ran, by its shapes: a few dozen lines.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

__all__ = ["Counted", "Op", "Operators", "causal_share", "count"]

Shape = Sequence[int]
Shapes = tuple[tuple[int, ...], ...]

_SOME = 256
"""Events that are read at once: a third of a millisecond with cold caches."""
_FAR = 32
"""Operators after a convolution among which is the one that takes its result."""


@dataclass(slots=True)
class Counted:
    """Floating-point operations of one step. products: matrix products and convolutions; attention: fused attention.

    unknown: names of operators whose arithmetic cannot be told; the figures then say too little.
    """

    products: float = 0.0
    attention: float = 0.0
    recomputed: float = 0.0
    unknown: set[str] = field(default_factory=set)

    @property
    def total(self) -> float:
        return self.products + self.attention


class Op(NamedTuple):
    """One operator as torch recorded it, with the shape of a convolution's result behind those of what it was given.

    again: it belongs to the forward pass, and ran in backward. last: a convolution that the backward pass ended with.
    """

    name: str
    shapes: Shapes
    again: bool
    last: bool = False

    @property
    def attends(self) -> bool:
        return _ATTENTION.fullmatch(self.name) is not None

    @property
    def attended(self) -> Shapes:
        """The shapes of query, key and value of one that attends."""
        return self.shapes[1:4] if self.name.endswith("_backward") else self.shapes[:3]


# ---- formulas


def _product(a: Shape, b: Shape) -> float:
    return 2.0 * a[0] * a[1] * b[1] if len(a) == len(b) == 2 else 2.0 * a[0] * a[1] * a[2] * b[2]


def _grouped(a: Shape, b: Shape) -> float:
    """Every row of a with one of the matrices in b."""
    if len(a) != 2 or len(b) != 3:
        raise ValueError("the sizes of the groups are not in the shapes")
    return 2.0 * a[0] * a[1] * b[2]


_PRODUCTS: dict[str, Callable[[Shapes], float]] = {
    "aten::mm": lambda shapes: _product(shapes[0], shapes[1]),
    "aten::bmm": lambda shapes: _product(shapes[0], shapes[1]),
    "aten::addmm": lambda shapes: _product(shapes[1], shapes[2]),
    "aten::_addmm_activation": lambda shapes: _product(shapes[1], shapes[2]),
    "aten::baddbmm": lambda shapes: _product(shapes[1], shapes[2]),
    "aten::_scaled_mm": lambda shapes: _product(shapes[0], shapes[1]),
    "aten::_grouped_mm": lambda shapes: _grouped(shapes[0], shapes[1]),
}
_CONVOLUTIONS = frozenset(("aten::convolution", "aten::convolution_overrideable"))
_CONVOLUTION_BACKWARD = "aten::convolution_backward"
_ATTENTION = re.compile(r"aten::_scaled_dot_product_(flash_attention|efficient_attention|cudnn_attention|fused_attention).*")
_UNKNOWN = re.compile(
    r"aten::(_flash_attention|_efficient_attention|_thnn_fused|_cudnn_rnn|miopen_rnn|mkldnn_rnn|_fft)\w*|(torch_attn|flash_attn\w*)::.*"
)


def _attention(query: Shape, key: Shape, value: Shape) -> float:
    """Scores and weighted values of one forward pass, all pairs of positions."""
    batch, heads, length, width = query
    return 2.0 * batch * heads * length * key[2] * (width + value[3])


def causal_share(length: int, keys: int) -> float:
    """Share of the pairs of positions that causal attention needs, its mask beginning at the upper left."""
    short = min(length, keys)
    return (short * (short + 1) // 2 + (length - short) * keys) / (length * keys)


def _convolution(x: Shape, weight: Shape, out: Shape) -> float:
    """Transposed where the weight's first dimension is the input's channels."""
    spatial = x[2:] if weight[0] == x[1] != out[1] else out[2:]
    total = 2.0 * x[0]
    for size in (*spatial, *weight):
        total *= size
    return total


# ---- reading what was recorded

_NOTHING, _NODE, _NOT_TOLD, _FORMULA, _FORWARD_CONVOLUTION, _BACKWARD_CONVOLUTION = range(6)


def _kind(name: str) -> int:
    """What an operator is to us; from _NOT_TOLD on it is taken as a whole, with all that runs inside of it."""
    if name in _PRODUCTS or _ATTENTION.fullmatch(name):
        return _FORMULA
    if name in _CONVOLUTIONS:
        return _FORWARD_CONVOLUTION
    if name == _CONVOLUTION_BACKWARD:
        return _BACKWARD_CONVOLUTION
    if _UNKNOWN.fullmatch(name):
        return _NOT_TOLD
    if name.startswith("autograd::engine::") and not name.endswith("AccumulateGrad"):
        return _NODE
    return _NOTHING


class Operators:
    """What ran in all forward passes of a step, or in all backward passes: how often each operator that computes did.

    unknown: names of those whose arithmetic cannot be told. unseen: convolutions of which it cannot be told yet: the shape of
    their result was not seen, since what takes it lies outside of the model.
    """

    def __init__(self, *, backward: bool) -> None:
        self.ran: Counter[Op] = Counter()
        self.unknown: set[str] = set()
        self.unseen: Counter[Op] = Counter()
        self._backward = backward
        self._kinds: dict[str, int] = {}
        self._begin_thread()

    def _begin_thread(self) -> None:
        self._begun = False
        self._inside = 0  # depth below an operator that is counted as a whole
        self._open: list[_Convolution] = []
        self._last: Op | None = None  # a convolution's gradients, with no node of the graph after them so far

    def read_some(self, events: list[Any]) -> None:
        """The next of one thread's events, which are gone from the list then. At the thread's end the list is empty."""
        if not self._begun:
            self._begun = True
            events.reverse()  # what is taken from the end of a list does not move the rest
        self._read(events[: -_SOME - 1 : -1])
        del events[-_SOME:]
        if not events:
            self.unseen.update(each.op for each in self._open)
            self._settle_last(last=True)  # its input is the batch, which needs no gradient
            self._begin_thread()

    def _read(self, events: list[Any]) -> None:
        kinds, inside = self._kinds, self._inside
        for event in events:
            name = event.name()
            if not name:  # only the end of an operator has none; asking for the kind as well takes half as much again
                inside -= inside > 0
            elif inside:
                inside += 1
            else:
                kind = kinds.get(name)
                if kind is None:
                    kind = kinds[name] = _kind(name)
                inside = kind >= _NOT_TOLD
                if kind or self._open:
                    self._take(event, name, kind)
        self._inside = inside

    def _take(self, event: Any, name: str, kind: int) -> None:
        if kind == _NODE:
            self._settle_last(last=False)
        elif kind == _NOT_TOLD:
            self.unknown.add(name)
        if kind <= _NOT_TOLD and not self._open:
            return
        shapes = tuple(map(tuple, event.shapes()))
        self._open = [each for each in self._open if not self._closes(each, shapes)]
        if kind <= _NOT_TOLD:
            return
        op = Op(name, shapes, self._backward and event.sequence_nr() >= 0 and event.scope() == 0)
        if kind == _FORMULA:
            self.ran[op] += 1
        elif kind == _FORWARD_CONVOLUTION:
            self._open.append(_Convolution(op))
        else:
            self._settle_last(last=False)
            self._last = op

    def _closes(self, convolution: _Convolution, shapes: Shapes) -> bool:
        """Whether nothing more is to be learned of a convolution's result after an operator with these shapes."""
        try:
            out = convolution.result_in(shapes)
        except (IndexError, ValueError):
            self.unseen[convolution.op] += 1
            return True
        if out is not None:
            self.ran[convolution.op._replace(shapes=(*convolution.op.shapes[:2], out))] += 1
        return out is not None

    def close_by(self, backward: Operators) -> None:
        """Takes the shapes of results that were not seen from the gradients of the same inputs and weights."""
        for op in [*self.unseen]:
            same = [
                (op._replace(shapes=(*op.shapes[:2], other.shapes[0])), times)
                for other, times in backward.ran.items()
                if other.name == _CONVOLUTION_BACKWARD and other.shapes[1:3] == op.shapes[:2]
            ]
            left = {found for found, times in same if times > self.ran[found]}
            if len(left) == 1:  # with more, they differ in their strides, and the one that was not seen may be either
                self.ran[left.pop()] += self.unseen.pop(op)

    def _settle_last(self, *, last: bool) -> None:
        if self._last is not None:
            self.ran[self._last._replace(last=last)] += 1
            self._last = None


class _Convolution:
    """One whose result's shape, which was not recorded, is looked for: in the next operator that takes something of its kind."""

    def __init__(self, op: Op) -> None:
        self.op = op
        self._left = _FAR

    def result_in(self, shapes: Shapes) -> tuple[int, ...] | None:
        """The result's shape if it is one of these; raises IndexError or ValueError where it will not be found."""
        x, weight = self.op.shapes[:2]
        for shape in shapes:
            if len(shape) != len(x):
                continue
            if shape == x:
                if weight[0] == x[1]:
                    return shape
            elif shape[0] == x[0] and shape[1] in (weight[0], weight[1]):
                return shape
        self._left -= 1
        if not self._left:
            raise ValueError("nothing takes its result")
        return None


# ---- counting


def count(operators: Operators, causal: Mapping[tuple[Any, Any], float]) -> Counted:
    """causal: (shape of the query, shape of the key) -> share of the pairs that are needed; absent: all."""
    counted = Counted(unknown=operators.unknown.union(op.name for op in operators.unseen))
    for op, times in operators.ran.items():
        try:
            _add(counted, op, times, causal)
        except (IndexError, ValueError):
            counted.unknown.add(op.name)
    return counted


def _add(counted: Counted, op: Op, times: int, causal: Mapping[tuple[Any, Any], float]) -> None:
    attention = False
    if op.name in _PRODUCTS:
        flops = _PRODUCTS[op.name](op.shapes)
    elif op.name in _CONVOLUTIONS:
        flops = _convolution(*op.shapes)
    elif op.name == _CONVOLUTION_BACKWARD:
        out, x, weight = op.shapes[:3]
        counted.products += times * _convolution(x, weight, out) * (1 if op.last else 2)
        return
    else:
        attention = True
        query, key, value = op.attended
        flops = _attention(query, key, value) * causal.get((query, key), 1.0)
    if op.again:
        counted.recomputed += times * flops
    elif attention:
        counted.attention += times * flops * (2 if op.name.endswith("_backward") else 1)
    else:
        counted.products += times * flops
