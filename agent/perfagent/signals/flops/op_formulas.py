"""Counts the floating-point operations of one recorded step from its operators and their shapes, by formula.

One step of a model with 300 tensors leaves 26,000 events, which hold 15 MB of native memory if they are read only after
the step. They are reduced to how many times each computing operator ran, by its shapes: a few dozen lines.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, NamedTuple

from perfagent.signals.convolutions import FORWARD, GRADIENTS, NODES, Convolution, Sought, convolution
from perfagent.signals.flops.autograd_graph import PRODUCTS

__all__ = ["Attended", "Counted", "Op", "Operators", "causal_share", "count"]

Shape = Sequence[int]
Shapes = tuple[tuple[int, ...], ...]


@dataclass(slots=True)
class Counted:
    """The floating-point operations of one step.

    products: matrix products and convolutions.
    attention: scores and weighted values, whichever kernel computes them.
    unknown: names of operators whose arithmetic is not known; the figures are then too low.
    kind: the dtype in which most of it is multiplied; empty if not known.
    """

    products: float = 0.0
    attention: float = 0.0
    recomputed: float = 0.0
    unknown: set[str] = field(default_factory=set)
    kind: str = ""

    @property
    def total(self) -> float:
        return self.products + self.attention


class Op(NamedTuple):
    """One operator as torch recorded it. shapes: of its inputs; for a convolution, followed by that of its result.

    again: it belongs to the forward pass but ran in backward.
    transposed: of a convolution; None if not known.
    gradients: of a convolution's backward pass, how many of two it computes.
    causal: of attention; None if not known.
    """

    name: str
    shapes: Shapes
    again: bool
    transposed: bool | None = None
    gradients: int = 2
    causal: bool | None = None

    @property
    def is_gradient(self) -> bool:
        return self.name.endswith("_backward")

    @property
    def attends(self) -> bool:
        return _ATTENTION.fullmatch(self.name) is not None

    @property
    def forward(self) -> Op:
        """For a gradient: the operator that it is the gradient of, or one with the same cost."""
        if self.attends:
            return self._replace(name=self.name.removesuffix("_backward"), shapes=self.attended)
        return self._replace(gradients=1)

    @property
    def attended(self) -> Shapes:
        """For attention: the shapes of query, key and value."""
        return self.shapes[1:4] if self.is_gradient else self.shapes[:3]


# ---- formulas


def _product(a: Shape, b: Shape) -> float:
    return 2.0 * a[0] * a[1] * b[1] if len(a) == len(b) == 2 else 2.0 * a[0] * a[1] * a[2] * b[2]


def _grouped(a: Shape, b: Shape) -> float:
    """Counts every row of a with one of the matrices in b, as experts do. If one of them has no dimension for the
    groups, the groups share its rows, its columns, or (for gradients of the experts' weights) the dimension that is
    summed over. Counts all of it, since the shapes do not show how much lies behind the last group."""
    if len(a) == len(b) == 3:
        return _product(a, b)
    return 2.0 * a[-2] * a[-1] * b[-1]


_PRODUCTS: dict[str, Callable[[Shapes], float]] = {
    "aten::mm": lambda shapes: _product(shapes[0], shapes[1]),
    "aten::bmm": lambda shapes: _product(shapes[0], shapes[1]),
    "aten::addmm": lambda shapes: _product(shapes[1], shapes[2]),
    "aten::mv": lambda shapes: 2.0 * shapes[0][0] * shapes[0][1],
    "aten::addmv": lambda shapes: 2.0 * shapes[1][0] * shapes[1][1],
    "aten::_addmm_activation": lambda shapes: _product(shapes[1], shapes[2]),
    "aten::baddbmm": lambda shapes: _product(shapes[1], shapes[2]),
    "aten::addbmm": lambda shapes: _product(shapes[1], shapes[2]),
    "aten::_scaled_mm": lambda shapes: _product(shapes[0], shapes[1]),
    "aten::_scaled_mm_v2": lambda shapes: _product(shapes[0], shapes[1]),
    "aten::_grouped_mm": lambda shapes: _grouped(shapes[0], shapes[1]),
    "aten::_scaled_grouped_mm": lambda shapes: _grouped(shapes[0], shapes[1]),
    "aten::_scaled_grouped_mm_v2": lambda shapes: _grouped(shapes[0], shapes[1]),
}
_ATTENTION = re.compile(
    r"aten::_scaled_dot_product_(flash_attention|efficient_attention|cudnn_attention|fused_attention).*"
)
_UNKNOWN = re.compile(
    r"aten::(_flash_attention|_efficient_attention|_thnn_fused|_cudnn_rnn|miopen_rnn|mkldnn_rnn|_fft|_sparse_\w*mm|_cslt_sparse_mm|sparse_sampled)\w*"
    r"|(torch_attn|flash_attn\w*|xformers\w*)::.*|torch_sparse::spmm\w*|pyg::\w+_matmul\w*"
)
_OF_SPARSE = frozenset(("aten::_nnz", "aten::_sparse_addmm"))
"""Operators that a product with a sparse matrix calls: its cost follows from the number of values, not from its shape.
By its shape it counted 466 times too much for a graph network of 20,000 nodes."""


def _attention(query: Shape, key: Shape, value: Shape) -> float:
    """Counts scores and weighted values of one forward pass, for all pairs of positions."""
    batch, heads, length, width = query
    return 2.0 * batch * heads * length * key[2] * (width + value[3])


def causal_share(length: int, keys: int) -> float:
    """Returns the share of position pairs that causal attention needs, with its mask beginning at the upper left."""
    short = min(length, keys)
    return (short * (short + 1) // 2 + (length - short) * keys) / (length * keys)


# ---- reading the recording

_NOTHING, _NODE, _PRODUCT_NODE, _NOT_TOLD, _PRODUCT, _ATTENDS, _FORWARD_CONVOLUTION, _BACKWARD_CONVOLUTION = range(8)


def _kind(name: str) -> int:
    """Returns the kind of an operator. From _NOT_TOLD on, an operator is counted as a whole, with all that
    runs inside it."""
    if name in _PRODUCTS:
        return _PRODUCT
    if _ATTENTION.fullmatch(name):
        return _ATTENDS
    if name in FORWARD:
        return _FORWARD_CONVOLUTION
    if name == GRADIENTS:
        return _BACKWARD_CONVOLUTION
    if name in NODES or PRODUCTS.fullmatch(name):
        return _PRODUCT_NODE
    if _UNKNOWN.fullmatch(name):
        return _NOT_TOLD
    if name.startswith("autograd::engine::") and not name.endswith("AccumulateGrad"):
        return _NODE
    return _NOTHING


@dataclass(slots=True)
class _Place:
    """How far the reading of one thread's operators has come in one call."""

    inside: int = 0
    """Depth below an operator that is counted as a whole."""
    open: list[tuple[Sought, int]] = field(default_factory=list)
    """Convolutions whose result was not seen yet, and their places in the list of numbered operators."""
    number: int = -1
    """Number of the running graph node if it belongs to a product; else -1."""
    ends_with: int = -1
    """Place of the newest gradients of a convolution, while no other graph node has followed them; else -1."""


class Operators:
    """The operators of all forward passes of a step, or of all its backward passes: how many times each
    computing operator ran.

    passed: for backward passes, the operators of the forward passes that they came through, each once.
    unknown: names of operators whose arithmetic is not known.
    unseen: convolutions that cannot be counted yet: the shape of their result was not seen, since it is used outside of
        the model.

    Convolutions and attention appear here once they are settled.
    """

    def __init__(self, *, backward: bool) -> None:
        self.ran: Counter[Op] = Counter()
        self.passed: list[tuple[int, Op]] = []
        self.unknown: set[str] = set()
        self.unseen: Counter[Op] = Counter()
        self._backward = backward
        self._kinds: dict[str, int] = {}
        self._numbered: list[tuple[int, Op]] = []  # by number in the graph; without a node, that of a later one
        self._came_through: set[tuple[int, str]] = set()
        self._graph = False
        self._of_gradients: set[int] = set()  # nodes of products that a backward pass computed and left in a graph
        self._second = False  # a later pass came through those nodes
        self._places: dict[int, _Place] = {}  # by thread

    def begin(self, *, graph: bool = False) -> None:
        """Begins another call. graph: the backward pass builds a graph, too: nothing then distinguishes recomputation
        from gradients, so all of it counts as gradients."""
        self._places.clear()
        self._graph = graph

    def end(self) -> None:
        """Ends a call, once all that was recorded of it has been read."""
        for place in self._places.values():
            if place.ends_with >= 0:  # its input is the batch, which needs no gradient
                self._learn(place.ends_with, gradients=1)
        self._places.clear()

    def read(self, events: Sequence[Any]) -> None:
        """Reads what one thread recorded in a call, or the next part of it: 0.7 µs per event."""
        if not events:
            return
        at = self._places.setdefault(events[0].thread_id(), _Place())
        kinds, inside = self._kinds, at.inside
        for event in events:
            name = event.name()
            if not name:  # only the end of an operator has no name; reading the kind as well takes half as long again
                inside -= inside > 0
            elif inside:
                inside += 1
                if name in _OF_SPARSE:
                    self.unknown.add("a product of a sparse matrix")
            else:
                kind = kinds.get(name)
                if kind is None:
                    kind = kinds[name] = _kind(name)
                inside = kind >= _NOT_TOLD
                if kind or at.open:
                    self._take(at, event, name, kind)
        at.inside = inside

    def _take(self, at: _Place, event: Any, name: str, kind: int) -> None:
        if kind == _NODE:
            at.number = at.ends_with = -1
        elif kind == _PRODUCT_NODE:
            at.number = event.sequence_nr()
        elif kind == _NOT_TOLD:
            self.unknown.add(name)
        if kind <= _NOT_TOLD and not at.open:
            return
        shapes = tuple(map(tuple, event.shapes()))
        at.open = [each for each in at.open if not self._closes(*each, shapes)]
        if kind <= _NOT_TOLD:
            return
        number = event.sequence_nr()
        again = self._backward and number >= 0 and event.scope() == 0
        if again and self._graph:
            again = False
            self._of_gradients.add(number)
        op = Op(name, shapes, again)
        if kind == _PRODUCT:
            self.ran[op] += 1
            if self._comes_through(at.number, op):
                self.passed.append((at.number, op))
        elif kind == _ATTENDS:
            self._numbered.append((at.number if op.is_gradient else number, op))
        elif kind == _FORWARD_CONVOLUTION:
            at.open.append((Sought(*shapes[:2]), len(self._numbered)))
            self._numbered.append((number, op._replace(shapes=shapes[:2])))
        else:
            at.ends_with = len(self._numbered)
            self._numbered.append((at.number, op._replace(shapes=shapes[:3])))

    def _comes_through(self, number: int, op: Op) -> bool:
        """True at the first operator of a node: the pass may compute two gradients, and so meet the node again."""
        if number in self._of_gradients:
            self._second = True
            return False
        if number < 0 or op.again or (number, op.name) in self._came_through:
            return False
        self._came_through.add((number, op.name))
        return True

    def _closes(self, sought: Sought, place: int, shapes: Shapes) -> bool:
        """True if the search for a convolution's result ends at an operator with these shapes."""
        out = sought.result_in(shapes)
        if out:
            self._learn(place, shapes=(*self._numbered[place][1].shapes, out))
        return out is not None

    def _learn(self, place: int, **of_it: Any) -> None:
        number, op = self._numbered[place]
        self._numbered[place] = number, op._replace(**of_it)

    @property
    def not_told(self) -> set[str]:
        """Names of the operators that the count misses."""
        missed = self.unknown.union(op.name for op in self.unseen)
        if self._of_gradients and not self._second:  # torch.autograd.grad used that graph, and is not recorded
            missed.add("second derivatives")
        return missed

    def settle(self, nodes: Mapping[int, Sequence[Convolution | bool]]) -> None:
        """Adds what autograd's graph knows about convolutions and attention. nodes: by number, those of the outermost
        pass first; for attention, whether it is causal."""
        told = set()
        for number, op in reversed(self._numbered):  # of several with one number, the last has the node
            settled = _settled(op, nodes.get(number, ())) if (op.name, number) not in told else op
            if not op.is_gradient:
                told.add((op.name, number))
            elif self._comes_through(number, op):
                self.passed.append((number, settled.forward))
            ran = self.unseen if op.name in FORWARD and len(settled.shapes) < 3 else self.ran
            ran[settled] += 1
        self._numbered = []

    def close_by(self, backward: Operators) -> None:
        """Takes the shapes of results that were not seen from gradients of the same inputs and weights."""
        for op in [*self.unseen]:
            same = [
                (op._replace(shapes=(*op.shapes, other.shapes[0])), times)
                for other, times in backward.ran.items()
                if other.name == GRADIENTS and other.shapes[1:3] == op.shapes
            ]
            left = {found for found, times in same if times > self.ran[found]}
            if len(left) == 1:  # several differ in their strides, and any of them may be the one that was not seen
                self.ran[left.pop()] += self.unseen.pop(op)


def _settled(op: Op, known: Sequence[Convolution | bool]) -> Op:
    """Completes a convolution, an attention or their gradients with what one of the graph nodes that may
    belong to it knows."""
    for node in known:
        if isinstance(node, bool):
            if op.attends:
                return op._replace(causal=node)
        elif op.name == GRADIENTS and node.out == op.shapes[0]:
            return op._replace(transposed=node.transposed, gradients=node.gradients)
        elif op.name in FORWARD and node.fits(*op.shapes[:2]):
            return op._replace(shapes=(*op.shapes[:2], node.out), transposed=node.transposed)
    return op


# ---- counting


class Attended:
    """Finds the products that are attention's scores and weighted values, where no fused kernel computed them.

    causal: (shape of the query, shape of the key) -> share of the position pairs that are needed.
    length: of the samples, which identifies the scores that the model computes itself; 0 if not known.
    """

    def __init__(self, causal: Mapping[tuple[Any, Any], float], length: int) -> None:
        self.causal, self._length = causal, length
        self._pairs: dict[tuple[int, int, int], float] = {}
        for (query, key), share in causal.items():
            if len(query) == len(key) == 4:
                self._pairs[query[0] * query[1], query[2], key[2]] = self._pairs[
                    query[0] * query[1], key[2], query[2]
                ] = share

    def share(self, op: Op) -> float | None:
        """Returns the share of a product's position pairs that are needed; None if it is not part of attention."""
        a, b = op.shapes[1:3] if op.name == "aten::baddbmm" else op.shapes[:2]
        if len(a) != 3 or len(b) != 3:
            return None
        sizes = a[1], a[2], b[2]
        for pair in combinations(sizes, 2):  # scores are the result or one of the inputs; the same for gradients
            if (a[0], *pair) in self._pairs:
                return self._pairs[a[0], *pair]
        return 1.0 if self._length > 1 and sizes.count(self._length) > 1 else None


def count(ran: Mapping[Op, int], attended: Attended, unknown: Iterable[str] = ()) -> Counted:
    """Counts all operators that ran. unknown: names of others that ran."""
    counted = Counted(unknown=set(unknown))
    for op, times in ran.items():
        try:
            _add(counted, op, times, attended)
        except (IndexError, ValueError):
            counted.unknown.add(op.name)
    return counted


def _add(counted: Counted, op: Op, times: int, attended: Attended) -> None:
    share = None
    if op.name in _PRODUCTS:
        share = attended.share(op)
        flops = _PRODUCTS[op.name](op.shapes) * (1.0 if share is None else share)
    elif op.name in FORWARD:
        x, weight, out = op.shapes
        flops = convolution(x, weight, out, op.transposed)
    elif op.name == GRADIENTS:
        out, x, weight = op.shapes
        flops = op.gradients * convolution(x, weight, out, op.transposed)
    else:
        query, key, value = op.attended
        share = attended.causal.get((query, key), 1.0) if op.causal is None else 1.0
        if op.causal:
            share = causal_share(query[-2], key[-2])
        flops = _attention(query, key, value) * share * (2 if op.is_gradient else 1)
    if op.again and not op.is_gradient:
        counted.recomputed += times * flops
    elif share is not None:
        counted.attention += times * flops
    else:
        counted.products += times * flops
