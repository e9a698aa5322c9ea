"""Reduces a recording to how many times each computing operator ran, by its shapes: a few dozen lines, where one step of
a model with 300 tensors leaves 26,000 events.

What the recording lacks is read from autograd's graph: the dtype of products, which gradients of convolutions are computed,
and whether attention is causal. Each node has the number that the recording gives its operator. Only the node's own fields
are read: the tensors that it keeps may be on another device, on a disk, or be recomputed on access.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from perfagent.libraries import COUNTLESS_OPERATORS
from perfagent.measure.flops.op import CONVOLUTIONS, GRADIENTS, PRODUCTS, Op, Shape, Shapes

if TYPE_CHECKING:
    import torch
    from torch._C._autograd import ProfilerEvent
    from torch.autograd.graph import GradientEdge, Node

__all__ = ["Convolution", "Operators", "Results", "in_graph"]

Results = dict[Shapes, Counter[tuple[Shape, bool | None]]]
"""(shape of a convolution's input, of its weight) -> how many have a result of that shape, and are transposed or not; None if
that is not known."""
_UNKNOWN = re.compile(
    r"aten::(_flash_attention|_efficient_attention|_thnn_fused|_cudnn_rnn|miopen_rnn|mkldnn_rnn|_fft|_sparse_\w*mm|_cslt_sparse_mm|sparse_sampled)\w*"
    rf"|torch_attn::.*|{COUNTLESS_OPERATORS}"
)
_OF_SPARSE = frozenset(("aten::_nnz", "aten::_sparse_addmm"))
"""Operators that a product with a sparse matrix calls: its cost follows from the number of values, not from its shape.
By its shape it counted 466 times too much for a graph network of 20,000 nodes."""
_CONVOLUTIONS = frozenset(("ConvolutionBackward0", "ConvolutionOverrideableBackward0"))
_PRODUCT_NODES = re.compile(
    r"(Mm|Addmm|AddmmActivation|Bmm|Baddbmm|Addbmm|Mv|Addmv|GroupedMm|ScaledDotProduct\w+|Convolution(Overrideable)?)Backward0"
)
"""Nodes whose gradients are products of the same size as in the forward pass."""
_NOTHING, _NODE, _PRODUCT_NODE, _COUNTED_WHOLE = range(4)


class Convolution(NamedTuple):
    """gradients: how many of input and weight get one. out: shows whether an operator may be this one's gradient. (Node
    numbers are not enough: each thread has its own.)"""

    out: Shape
    transposed: bool
    gradients: int


def in_graph(roots: Iterable[torch.Tensor | GradientEdge]) -> Iterator[tuple[Node, str, Convolution | bool | None]]:
    """Yields (node, dtype, convolution or whether it is causal) of all products that a backward pass from these
    tensors may meet. Half a microsecond per node."""
    waiting = [getattr(root, "node", None) or getattr(root, "grad_fn", None) for root in roots]
    seen: set[Node | None] = {None}
    computes: dict[type[Node], bool] = {}
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if type(node) not in computes:
            computes[type(node)] = _PRODUCT_NODES.fullmatch(node.name()) is not None
        waiting += [after for after, _ in node.next_functions]
        if computes[type(node)]:
            made = getattr(node, "_input_metadata", None)  # torch 2.4 has none: neither dtypes nor gradients are known
            known: Convolution | bool | None = getattr(node, "_saved_is_causal", None)
            if made and node.name() in _CONVOLUTIONS:
                gradients = sum(after is not None for after, _ in node.next_functions[:2])
                known = Convolution(tuple(made[0].shape), node._saved_transposed, gradients)
            yield node, str(made[0].dtype).removeprefix("torch.") if made else "", known


def _kind(name: str) -> int:
    """_COUNTED_WHOLE: counted with all that runs inside it."""
    if {name} & {*PRODUCTS, *CONVOLUTIONS, GRADIENTS} or Op(name, ()).attends or _UNKNOWN.fullmatch(name):
        return _COUNTED_WHOLE
    if _PRODUCT_NODES.fullmatch(name):
        return _PRODUCT_NODE
    return _NODE if name.startswith("autograd::engine::") and not name.endswith("AccumulateGrad") else _NOTHING


class Operators:
    """The operators of all forward passes of a step, or of all its backward passes: how many times each
    computing operator ran.

    passed: for backward passes, the operators of the forward passes that they came through, each once.
    unknown: names of operators whose arithmetic is not known.

    numbered: gradients of convolutions, and attention, by their numbers in the graph (without a node, that of a later
    one). They are counted in `ran` once they are settled (probes/flops/op_settling.py).
    """

    def __init__(self, *, backward: bool) -> None:
        self.ran: Counter[Op] = Counter()
        self.passed: list[tuple[int, Op]] = []
        self.unknown: set[str] = set()
        self._backward = backward
        self._kinds: dict[str, int] = {}
        self.numbered: list[tuple[int, Op]] = []
        self._came_through: set[tuple[int, str]] = set()

    def read(self, threads: Iterable[Iterable[ProfilerEvent]]) -> None:
        """Reads what was recorded of a call: 0.7 µs per event."""
        for events in threads:
            self._read(events)
        if self.numbered and self.numbered[-1][1].name == GRADIENTS:  # its input is the batch, which needs no gradient
            number, op = self.numbered[-1]
            self.numbered[-1] = number, op._replace(gradients=1)

    def _read(self, events: Iterable[ProfilerEvent]) -> None:
        """Reads the events of one thread. The end of an operator is an event without a name."""
        kinds = self._kinds
        inside, number = 0, -1  # depth below an operator that is counted whole; the running node of a product
        for event in events:
            name = event.name()
            if not name:  # reading the kind as well takes half as long again
                inside -= inside > 0
            elif inside:
                inside += 1
                if name in _OF_SPARSE:
                    self.unknown.add("a product of a sparse matrix")
            else:
                kind = kinds.get(name)
                if kind is None:
                    kind = kinds[name] = _kind(name)
                if kind == _COUNTED_WHOLE:
                    inside = 1
                    self._add(event, name, number)
                elif kind:
                    number = event.sequence_nr() if kind == _PRODUCT_NODE else -1

    def _add(self, event: ProfilerEvent, name: str, number: int) -> None:
        shapes, own = tuple(map(tuple, event.shapes())), event.sequence_nr()
        op = Op(name, shapes)
        is_recomputed = self._backward and own >= 0 and event.scope() == 0  # type: ignore[attr-defined]
        if is_recomputed and not op.is_gradient:
            return
        if name in PRODUCTS:
            self.ran[op] += 1
            self.note_passed(number, op)
        elif name in CONVOLUTIONS:
            self.ran[op._replace(shapes=shapes[:2])] += 1
        elif name == GRADIENTS:
            self.numbered.append((number, op._replace(shapes=shapes[:3])))
        elif op.attends:
            self.numbered.append((number if op.is_gradient else own, op))
        else:
            self.unknown.add(name)

    def note_passed(self, number: int, op: Op) -> None:
        """At the first operator of a node: the pass may compute two gradients."""
        if number >= 0 and (number, op.name) not in self._came_through:
            self._came_through.add((number, op.name))
            self.passed.append((number, op.forward if op.is_gradient else op))
