"""Finds the operator of a step that made the first NaN, in the graph that autograd keeps for backward.

Every node of the graph keeps some of the tensors that its operator read or wrote. `read_graph` notes the range of each
before backward runs; ranges on a device arrive later. In the order in which the operators ran, the first one that *read*
a non-finite value names its producer; where none did, the loss itself is the first. Of operators whose output nobody
keeps, those are ruled out that cannot have made it, by their kind and the range of what they read. -inf is what masks
hold in healthy trainings: only NaN and +inf count, and -inf where the operator that made them read it.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from perfagent.causes.batch import can_be_counted
from perfagent.device import Reading, read_later
from perfagent.measure.loss_function import is_packed
from perfagent.wire.evidence import OperatorFound

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Graph", "leaves_of", "operators_of", "read_graph"]

MOST_NODES = 20_000
MOST_S = 2.0
_TURNS = ("T", "ToCopy", "View", "Transpose", "Permute", "Unsqueeze", "Squeeze", "Slice", "Select", "Alias", "Expand")
_STAYS_FINITE = (
    "Tanh", "Sigmoid", "Relu", "Gelu", "Silu", "Embedding", "NativeDropout", "Index", "IndexSelect", "Gather", "UnsafeView",
    "Clone", "Mean", "Sum", "Neg", *(name for name in _TURNS if name != "ToCopy"),  # which may overflow
)  # fmt: skip
"""Operators whose output is finite if their inputs are."""
_UNSEEN = ("Add", "Sub", "Cat", "Stack", "Where", "MaskedFill", "Softmax", "LogSoftmax")
"""Operators that keep none of their inputs, and rarely turn finite ones into NaN: a softmax does of a row of -inf."""
_PRODUCTS = ("Mul", "Mm", "Bmm", "Addmm", "Baddbmm", "Convolution")
_LOGARITHMS = {"Log": 0.0, "Log2": 0.0, "Log10": 0.0, "Log1P": -1.0}
"""Where they become -inf."""
_ARCS = ("Acos", "Asin", "Atanh", "Erfinv")
_MAKE_BAD = (
    *_LOGARITHMS, *_ARCS, "Div", "Sqrt", "Rsqrt", "Reciprocal", "Pow", "Exp", "Expm1", "Acosh", "Logit", "Std", "Atan2", "Tan",
)  # fmt: skip
_HALF = 1e6
"""The largest number of float16 is smaller: products overflow."""
_SMALL = 16.0
"""By so much a value may be multiplied without being suspected of overflowing there."""
_COMPILED = "CompiledFunction"
"""All that torch.compile made one function of: all parameters of the model are handed to it."""
_WRITTEN = ("result", "output", "out")
_UNREAD_IN_TRAINING = ("running_mean", "running_var")
"""Buffers that a normalization only updates, unless it is in evaluation mode."""
_MEAN = 1
"""torch's number of `reduction="mean"`."""


@dataclass(slots=True)
class Kept:
    """A tensor that an operator keeps. maker: the place of the operator that made it, None where it was given from
    outside; low, high: its range, NaN where it holds one; most: the largest number of its type; count: its numbers."""

    name: str
    maker: int | None = None
    buffer: str = ""
    most: float = math.inf
    count: int = 0
    on_host: bool = True
    low: float = 0.0
    high: float = 0.0

    def is_bad(self) -> bool:
        """Whether it holds NaN or +inf."""
        return not self.high < math.inf

    def largest(self) -> float:
        return max(abs(self.low), abs(self.high))


@dataclass(slots=True)
class Node:
    """An operator. inputs: the places of the operators that made them, names of parameters, or None for what is given
    from outside. read, written: what it keeps of its inputs, and of what it put out."""

    name: str
    inputs: list[int | str | None]
    read: list[Kept]
    written: list[Kept]
    exponent: float = 0.0

    def below(self) -> list[Kept]:
        """What it read that holds -inf."""
        return [one for one in self.read if one.low == -math.inf]

    def is_by_a_number(self) -> bool:
        """Whether it multiplies, divides, or takes a power, by a number of the script."""
        return self.exponent >= 1.0 or any(one.name == "other" and one.count == 1 and one.on_host for one in self.read)

    def _only_scales(self) -> bool:
        """Whether the other factor of a product or quotient is finite and changes it by little, as a dropout's mask."""
        factor = self.read[0]
        if self.name == "Mul":
            return factor.largest() <= _SMALL
        least = 0.0 if factor.low <= 0.0 <= factor.high else min(abs(factor.low), abs(factor.high))
        return factor.largest() < math.inf and least * _SMALL >= 1.0

    def made(self) -> str | None:
        """`nan` or `-inf` if the kept inputs prove it, "" if the output is finite, None if unknown."""
        if self.name in _STAYS_FINITE or self.name in _UNSEEN:
            return ""
        if not self.read or self.below() or any(one.is_bad() for one in (*self.read, *self.written)):
            return None
        first = self.read[0]
        if self.written or (len(self.read) == 1 and self.name in ("Mul", "Div") and self._only_scales()):
            return ""  # of what it made, a part at least is seen
        if self.name.startswith("NllLoss"):
            return "nan" if any(one.name == "total_weight" and one.largest() == 0.0 for one in self.read) else ""
        if self.name in _LOGARITHMS:
            zero = _LOGARITHMS[self.name]
            return "nan" if first.low < zero else "-inf" if first.low == zero else ""
        if self.name in _ARCS and first.largest() > 1.0:
            return "nan"
        if self.name in _PRODUCTS:
            terms = 1 if self.name == "Mul" else min(one.count for one in self.read)
            unseen = math.sqrt(first.most) if len(self.read) == 1 else 1.0  # a parameter
            return "" if math.prod(one.largest() for one in self.read) * unseen * terms <= first.most else None
        return None


@dataclass(slots=True)
class Graph:
    """The operators that made a loss, in the order in which they ran."""

    nodes: list[Node] = field(default_factory=list)
    loss: Kept = field(default_factory=lambda: Kept("loss"))
    readings: list[tuple[list[Kept], Reading]] = field(default_factory=list)

    def ready(self) -> bool:
        """Never blocks."""
        return all(reading.ready() for _, reading in self.readings)

    def first_bad(self) -> OperatorFound | None:
        """The operator behind a loss that is no number; None for a loss that is one. Once ready."""
        for kept, reading in self.readings:
            numbers = iter(reading.values())
            for one in kept:
                one.low, one.high = next(numbers), next(numbers)
        self.readings = []
        if not self.loss.is_bad() and self.loss.low > -math.inf:
            return None
        found: OperatorFound = {}
        at, good = self._first_kept()
        read = [] if at is None else [one for one in self.nodes[at].read if one.is_bad()]
        if at is not None and read:
            found |= {"read_by": self.nodes[at].name, "read_as": [one.name for one in read]}
            if read[0].buffer:
                found["buffer"] = read[0].buffer
        producer = read[0].maker if read else len(self.nodes) - 1 if at is None else at
        if producer is not None:
            at = self._describe(producer, good, found)
        if at is not None:
            self._locate(at, found)
        return found

    def only_maker(self) -> OperatorFound | None:
        """The only operator that makes NaN or infinity of finite values: of a graph whose values are all bad, as after an
        update with NaN."""
        half = any(one.most < _HALF for node in self.nodes for one in node.read)
        kinds = {*_MAKE_BAD, *(_PRODUCTS if half else ())}
        makers = [at for at, node in enumerate(self.nodes) if node.name in kinds and not node.is_by_a_number()]
        if len(makers) != 1:
            return None
        found: OperatorFound = {"operator": self.nodes[makers[0]].name, "is_the_only_one": True}
        self._locate(makers[0], found)
        return found

    def _first_kept(self) -> tuple[int | None, set[int | None]]:
        """The first operator that keeps something bad, and those whose output was kept up to there and is good."""
        good: set[int | None] = set()
        for place, node in enumerate(self.nodes):
            kept = (*node.read, *node.written)
            good.update(one.maker for one in kept if not one.is_bad())
            if any(one.is_bad() for one in kept):
                return place, good
        return None, good

    def _describe(self, producer: int, good: set[int | None], found: OperatorFound) -> int:
        """Adds what is known of the operator that made what `producer` put out, and returns its place: of those whose
        output nobody kept the one that certainly made it, else the last that may have. (The inf of a product of
        half-precision matrices is first met as the NaN of a softmax two operators later.)"""
        between = [(place, self.nodes[place].made()) for place in self._unseen(producer, good)]
        possible = [place for place, made in between if made is None]
        at = max(possible, default=producer)
        certain = [(made == "-inf", place, made) for place, made in between if made]
        if certain:
            _, at, found["made"] = min(certain)
            if readers := [place for place, _ in between if place > at and self.nodes[place].below()]:
                found.setdefault("read_by", self.nodes[min(readers)].name)
        node = self.nodes[at]
        found["operator"] = node.name
        if node.name in _UNSEEN:
            found["inputs_unseen"] = True
        if below := node.below():
            found["minus_infinity"] = {"read_as": [one.name for one in below]}
            if below[0].maker is not None:
                found["minus_infinity"]["from"] = self.nodes[below[0].maker].name
        return at

    def _unseen(self, start: int, good: set[int | None]) -> Iterator[int]:
        """An operator, and those before it through whose output a bad value may have come: not kept, or -inf."""
        waiting, seen = [start], {start}
        while waiting:
            place = waiting.pop()
            node = self.nodes[place]
            yield place
            below: list[int | str | None] = [one.maker for one in node.below()]
            before = below or [one for one in node.inputs if one not in good]
            fresh = [one for one in before if isinstance(one, int) and one not in seen]
            seen.update(fresh)
            waiting += fresh

    def _locate(self, at: int, found: OperatorFound) -> None:
        """Between the uses of which parameters the operator is, and of which it is one itself."""
        own = next(self._parameters_of(at), None)
        if own is not None and self.nodes[at].name != _COMPILED:
            found["of"] = own
        if before := [name for place in range(at) for name in self._parameters_of(place)]:
            found["after"] = before[-1]
        later = (name for place in range(at + 1, len(self.nodes)) for name in self._parameters_of(place))
        if (following := next(later, None)) is not None:
            found["before"] = following

    def _parameters_of(self, place: int) -> Iterator[str]:
        """Parameters that feed the operator directly, or through what only turns or casts them."""
        for source in self.nodes[place].inputs:
            for _ in range(3):
                if not isinstance(source, int) or self.nodes[source].name not in _TURNS:
                    break
                source = self.nodes[source].inputs[0]  # noqa: PLW2901
            if isinstance(source, str):
                yield source


def read_graph(
    loss: Tensor, nodes: list[Any] | None, names: Mapping[int, str], buffers: Mapping[int, str]
) -> Graph | None:
    """Notes the graph of a loss. nodes: see `operators_of`; names, buffers: by id() of parameters and buffers. None where
    there are no nodes, it takes too long, or somebody's hooks keep the tensors elsewhere."""
    if nodes is None:
        return None
    nodes.sort(key=lambda node: node._sequence_nr())
    places = {node: place for place, node in enumerate(nodes)}
    graph, ranges, until = Graph(), _Ranges(), time.monotonic() + MOST_S
    for node in nodes:
        saved = _saved(node)
        if saved is None or time.monotonic() > until:
            return None
        read: list[Kept] = []
        written: list[Kept] = []
        are_bad = ranges.are_bad
        for name, tensor in saved:
            kept = Kept(name, places.get(_made_by(tensor)), buffers.get(id(tensor), ""))
            (written if name.startswith(_WRITTEN) else read).append(kept)
            if not are_bad:  # what follows is its consequence
                ranges.add(kept, tensor)
        inputs = [
            names.get(id(before.variable)) if hasattr(before, "variable") else places.get(before)
            for before, _ in node.next_functions
        ]
        exponent = getattr(node, "_saved_exponent", 0.0)
        name = str(node.name()).removesuffix("0").removesuffix("Backward")
        graph.nodes.append(Node(name, inputs, read, written, exponent if isinstance(exponent, (int, float)) else 0.0))
    ranges.add(graph.loss, loss.detach())
    graph.readings = ranges.collect()
    return graph


class _Ranges:
    """Takes the ranges of tensors: on the CPU at once, on a device later."""

    def __init__(self) -> None:
        self._later: dict[tuple[Any, Any], list[tuple[Kept, Tensor, Tensor]]] = {}
        self.are_bad = False

    def add(self, kept: Kept, tensor: Tensor) -> None:
        torch = sys.modules["torch"]
        # one of a class of its own may run anything, as a DTensor asks the other ranks
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or not tensor.numel():
            return
        if can_be_counted(tensor):
            kept.most = torch.finfo(tensor.dtype).max
        elif tensor.dim() or tensor.device.type == "meta":  # a whole number is a factor, as any other
            return
        kept.count, kept.on_host = tensor.numel(), tensor.is_cpu
        with torch.no_grad():
            low, high = torch.aminmax(torch.view_as_real(tensor) if tensor.is_complex() else tensor)
        if tensor.is_cpu:
            kept.low, kept.high = low.item(), high.item()
            self.are_bad = self.are_bad or kept.is_bad()
        else:
            self._later.setdefault((low.device, low.dtype), []).append((kept, low, high))

    def collect(self) -> list[tuple[list[Kept], Reading]]:
        stack = sys.modules["torch"].stack
        on_way = [
            ([kept for kept, _, _ in same], read_later(stack([one for _, *both in same for one in both])))
            for same in self._later.values()
        ]
        return [(kept, reading) for kept, reading in on_way if reading is not None]


def operators_of(loss: Tensor) -> list[Any] | None:
    """Autograd's nodes of the operators that made a loss, in no order; None where there are none, or too many."""
    waiting: list[Any] = [loss.grad_fn]
    seen = {loss.grad_fn}
    while waiting and loss.grad_fn is not None:
        for following, _ in waiting.pop().next_functions:
            if following is not None and following not in seen:
                if len(seen) >= MOST_NODES:
                    return None
                seen.add(following)
                if not hasattr(following, "variable"):  # a leaf has nothing before it
                    waiting.append(following)
    return [node for node in seen if not hasattr(node, "variable")] if loss.grad_fn is not None else None


def _saved(node: Any) -> list[tuple[str, Tensor]] | None:
    """The tensors that a node keeps, by name. None where hooks hold one of them: to read it would call them (activation
    checkpointing would run the model again, and what offloading gives back once is then missing in backward)."""
    found: list[tuple[str, Tensor]] = []
    unread: tuple[str, ...] = _UNREAD_IN_TRAINING if getattr(node, "_saved_training", False) else ()
    if getattr(node, "_saved_reduction", _MEAN) != _MEAN:  # a loss that divides by no weight keeps 0 as their sum
        unread += ("total_weight",)
    for attribute in dir(node):
        name = attribute.removeprefix("_raw_saved_")
        # "tensors": those of a function of the user's
        if name == attribute or name == "tensors" or name in unread:
            continue
        try:
            if any(map(is_packed, _each(getattr(node, attribute)))):
                return None
            value = getattr(node, attribute.removeprefix("_raw"))
        except RuntimeError:  # released, or changed in place since
            continue
        found += [(name, item) for item in _each(value) if isinstance(item, sys.modules["torch"].Tensor)]
    return found


def _each(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def _made_by(kept: Tensor) -> Any:
    """What made a tensor that some operator kept; None where it was given from outside: a batch, a number, a parameter,
    or one that is only turned or cast, as by the T of a linear layer's weight."""
    maker: Any = kept.grad_fn
    is_view = maker is not None and len(maker.next_functions) == 1 and hasattr(maker.next_functions[0][0], "variable")
    return None if is_view else maker


def leaves_of(nodes: list[Any]) -> set[int]:
    """The parameters, by id(), that operators read."""
    leaves = (before for node in nodes for before, _ in node.next_functions if hasattr(before, "variable"))
    return {id(leaf.variable) for leaf in leaves}
