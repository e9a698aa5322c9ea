"""Finds the operator of a step that made the first NaN, in the graph that autograd keeps for backward.

Every node of the graph keeps some of the tensors that its operator read or wrote. `read_graph` notes the range of each
before backward runs, and keeps none of them; ranges on a device arrive later. `Graph.first_bad` judges them. In the
order in which the operators ran, the first one that *read* a non-finite value names its producer among its inputs;
where none did, the loss itself is the first. Where nobody keeps what the operators between two kept values put out,
those are ruled out that cannot have made it, by their kind and by the range of what they read. -inf is what masks hold
in healthy trainings: only NaN and +inf count, and -inf where the operator that made them read it.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from perfagent.boundary.saved_tensors import is_packed
from perfagent.device import Reading, collect
from perfagent.rootcause.batch import can_be_counted
from perfagent.wire.evidence import OperatorFound

if TYPE_CHECKING:
    import torch

__all__ = ["Graph", "leaves_of", "read_graph"]

MOST_NODES = 20_000
MOST_S = 2.0
_TURNS = ("T", "ToCopy", "View", "Transpose", "Permute", "Unsqueeze", "Squeeze", "Slice", "Select", "Alias", "Expand")
_STAYS_FINITE = (
    "Tanh", "Sigmoid", "Relu", "Gelu", "Silu", "Embedding", "NativeDropout", "Index", "IndexSelect", "Gather", "UnsafeView",
    "Clone", "Mean", "Sum", "Neg",
    *(name for name in _TURNS if name != "ToCopy"),  # which may overflow
)  # fmt: skip
"""What these make of finite values is finite: the bad value was there before them."""
_OF_MASKS = ("Softmax", "LogSoftmax")
"""The same, but for -inf in all of a row; masks are set outside of what torch.compile compiled or inside, not in
between."""
_ADDS_UP = ("Add", "Sub", "Cat", "Stack", "Where", "MaskedFill")
"""What these put out was mostly in one of the tensors that they were given, of which they keep none."""
_PRODUCTS = ("Mul", "Mm", "Bmm", "Addmm", "Baddbmm", "Convolution")
_LOGARITHMS = {"Log": 0.0, "Log2": 0.0, "Log10": 0.0, "Log1P": -1.0}
"""Where they become -inf."""
_ARCS = ("Acos", "Asin", "Atanh", "Erfinv")
_MAKE_BAD = (
    *_LOGARITHMS, *_ARCS, "Div", "Sqrt", "Rsqrt", "Reciprocal", "Pow", "Exp", "Expm1", "Acosh", "Logit", "Std", "Atan2", "Tan",
)  # fmt: skip
_LARGE = 1e6
"""Half-precision numbers are smaller: products overflow."""
_SMALL = 16.0
"""By so much a value may be multiplied without being suspected of overflowing there."""
_COMPILED = "CompiledFunction"
"""All that torch.compile made one function of: what happens inside is not in the graph."""
_WRITTEN = ("result", "output", "out")
_UNREAD_IN_TRAINING = ("running_mean", "running_var")
"""What a normalization keeps and only updates, unless it is in evaluation mode."""


@dataclass(slots=True)
class Kept:
    """A tensor that an operator keeps. maker: the place of the operator that made it, None where it was given from
    outside; low, high: its range, NaN where it holds one; most: the largest number of its type; count: its numbers."""

    name: str
    maker: int | None
    buffer: str
    most: float = math.inf
    count: int = 0
    on_host: bool = True
    low: float = 0.0
    high: float = 0.0

    @property
    def is_bad(self) -> bool:
        """Whether it holds NaN or +inf."""
        return not self.high < math.inf

    @property
    def is_read(self) -> bool:
        return not self.name.startswith(_WRITTEN)

    @property
    def holds_minus_infinity(self) -> bool:
        return self.low == -math.inf

    @property
    def largest(self) -> float:
        return max(abs(self.low), abs(self.high))


@dataclass(slots=True)
class Node:
    """An operator. inputs: the places of the operators that made them, names of parameters, or None for what is given
    from outside."""

    name: str
    inputs: list[int | str | None]
    kept: list[Kept]
    exponent: float = 0.0

    def reads(self) -> list[Kept]:
        return [one for one in self.kept if one.is_read]

    def scaled(self) -> int | None:
        """Which input of a product or quotient cannot be seen, where the other is finite and scales it by little, as a
        dropout's mask does."""
        if len(self.kept) != 1 or self.name not in ("Mul", "Div"):
            return None
        factor = self.kept[0]
        least = 0.0 if factor.low <= 0.0 <= factor.high else min(abs(factor.low), abs(factor.high))
        is_small = factor.largest <= _SMALL if self.name == "Mul" else factor.largest < math.inf and least * _SMALL >= 1
        return 1 - _PLACES[factor.name] if is_small else None

    def is_by_a_number(self) -> bool:
        """Whether it multiplies, divides, or takes a power, by a number of the script."""
        by_number = any(one.name == "other" and one.count == 1 and one.on_host for one in self.kept)
        return by_number or self.exponent >= 1.0

    def made(self) -> str | None:
        """What bad value it certainly made of what it keeps; "" where it made none; None where that is not known."""
        read = self.reads()
        if self.name in (*_STAYS_FINITE, *_OF_MASKS, *_ADDS_UP) or self.scaled() is not None:
            return ""
        if not read or any(one.is_bad or one.holds_minus_infinity for one in self.kept):
            return None
        if len(read) < len(self.kept):
            return ""  # what it made is seen, at least in part
        first = read[0]
        if self.name.startswith("NllLoss"):
            return "nan" if any(one.name == "total_weight" and one.largest == 0.0 for one in read) else ""
        if self.name in _LOGARITHMS:
            zero = _LOGARITHMS[self.name]
            return "nan" if first.low < zero else "-inf" if first.low == zero else ""
        if self.name in _ARCS and first.largest > 1.0:
            return "nan"
        if self.name in _PRODUCTS:
            terms = 1 if self.name == "Mul" else min(one.count for one in read)
            unseen = math.sqrt(first.most) if len(read) == 1 else 1.0  # a parameter
            return "" if math.prod(one.largest for one in read) * unseen * terms <= first.most else None
        return None


@dataclass(slots=True)
class Graph:
    """The operators that made a loss, in the order in which they ran."""

    nodes: list[Node] = field(default_factory=list)
    loss: Kept = field(default_factory=lambda: Kept("loss", None, ""))
    readings: list[tuple[list[Kept], Reading]] = field(default_factory=list)

    def ready(self) -> bool:
        """Never blocks."""
        return all(reading.ready() for _, reading in self.readings)

    def first_bad(self) -> OperatorFound | None:
        """The operator behind a loss that is no number; None for a loss that is one. Once ready.

        operator: what made the value, from finite inputs; absent where it came from outside, as a batch or a buffer.
        inputs_known: nothing from outside, such as a batch, can be what it was made from. inputs_unseen: of finite ones
        it makes nothing bad, or hardly ever, and what it was given cannot be seen. read_by: the first operator that
        read it, and as what; buffer: the one that it read there. minus_infinity: the operator itself read -inf;
        {"read_as", "from"?}, from: what made that, absent where it came from outside. made: "nan" or "-inf", where it
        is certain. of: a parameter that the operator uses; after: the last one used before it; before: the first one
        used after it.
        """
        self._settle()
        if not (self.loss.is_bad or self.loss.holds_minus_infinity):
            return None
        at, good = self._first_kept()
        reader, read = (None, []) if at is None else (at, [one for one in self.nodes[at].reads() if one.is_bad])
        if read:
            producer = read[0].maker
        else:
            producer, reader = (len(self.nodes) - 1 if at is None else at), None
        found: OperatorFound = {}
        if producer is not None:
            producer = self._describe(producer, good, found)
        if reader is not None and "read_by" not in found:
            found |= {"read_by": self.nodes[reader].name, "read_as": [one.name for one in read]}
            if read[0].buffer:
                found["buffer"] = read[0].buffer
        self._locate(producer if producer is not None else reader, found)
        return found

    def only_maker(self) -> OperatorFound | None:
        """The operator that makes NaN or infinity of finite values, where it is the only one: of a graph whose values are
        all bad, as after an update with NaN. None where there are several, or none."""
        half = any(one.most < _LARGE for node in self.nodes for one in node.kept)
        kinds = {*_MAKE_BAD, *(_PRODUCTS if half else ())}
        makers = [at for at, node in enumerate(self.nodes) if node.name in kinds and not node.is_by_a_number()]
        if len(makers) != 1:
            return None
        found: OperatorFound = {"operator": self.nodes[makers[0]].name, "is_the_only_one": True}
        self._locate(makers[0], found)
        return found

    def _settle(self) -> None:
        for kept, reading in self.readings:
            numbers = reading.values()
            for number, one in enumerate(kept):
                one.low, one.high = numbers[2 * number : 2 * number + 2]
        self.readings = []

    def _first_kept(self) -> tuple[int | None, set[int | None]]:
        """The first operator that keeps something bad, and those whose output was kept up to there and is good."""
        good: set[int | None] = set()
        for place, node in enumerate(self.nodes):
            good.update(one.maker for one in node.kept if not one.is_bad)
            if any(one.is_bad for one in node.kept):
                return place, good
        return None, good

    def _describe(self, producer: int, good: set[int | None], found: OperatorFound) -> int:
        """Adds what is known of the operator that made what `producer` put out, and returns its place."""
        producer, made = self._origin(producer, good)
        lower = None if made else self._maker_of_minus_infinity(producer, good)
        if lower is not None:
            found["read_by"] = self.nodes[producer].name
            producer, made = lower
        node = self.nodes[producer]
        found["operator"] = node.name
        if made:
            found["made"] = made
        elif node.name in (*_ADDS_UP, *_OF_MASKS):
            found["inputs_unseen"] = True
        if made == "nan" or self._inputs_are_known(producer):
            found["inputs_known"] = True
        below = [one for one in node.reads() if one.holds_minus_infinity]
        if below:
            found["minus_infinity"] = {"read_as": [one.name for one in below]}
            origin = below[0].maker
            while origin is not None:
                found["minus_infinity"]["from"] = self.nodes[origin].name
                origin = next((one.maker for one in self.nodes[origin].reads() if one.holds_minus_infinity), None)
        return producer

    def _origin(self, producer: int, good: set[int | None]) -> tuple[int, str]:
        """What made the value that `producer` put out, and what that was where it is certain.

        Not every operator keeps what it read: the inf of a product of half-precision matrices is first met as the NaN
        of a softmax two operators later. Of those in between, the one that certainly made it is taken, or the only one
        that may have; else the one up to which values were only passed on.
        """
        certain: list[tuple[bool, int, str]] = []
        possible: list[int] = []
        for place in self._unseen(producer, good):
            made = self.nodes[place].made()
            if made:
                certain.append((made == "-inf", place, made))
            elif made is None:
                possible.append(place)
        if certain:
            _, place, made = min(certain)
            return place, made
        return (possible[0] if len(possible) == 1 else self._past_what_stays_finite(producer)), ""

    def _unseen(self, start: int, good: set[int | None]) -> Iterator[int]:
        """An operator, and those before it through whose output, which nobody keeps, a bad value may have come. What
        read -inf may have made of it whatever came."""
        waiting, seen = [start], {start}
        while waiting:
            place = waiting.pop()
            node = self.nodes[place]
            yield place
            if any(one.holds_minus_infinity for one in node.reads()):
                continue
            fresh = [one for one in node.inputs if isinstance(one, int) and one not in good and one not in seen]
            seen.update(fresh)
            waiting += fresh

    def _past_what_stays_finite(self, place: int) -> int:
        while True:
            node = self.nodes[place]
            scaled = node.scaled()
            if scaled is None and node.name not in (*_STAYS_FINITE, *_OF_MASKS):
                return place
            before = node.inputs[scaled or 0] if node.inputs else None
            if not isinstance(before, int) or (node.name in _OF_MASKS and self.nodes[before].name != _COMPILED):
                return place
            place = before

    def _maker_of_minus_infinity(self, place: int, good: set[int | None]) -> tuple[int, str] | None:
        """What made the -inf that an operator read, and "-inf" where it certainly did, if between the two it was only
        added to and the like: a linear layer makes NaN of it, and is not to blame."""
        last = next((one.maker for one in self.nodes[place].reads() if one.holds_minus_infinity), None)
        if last is None:
            return None
        makers = [one for one in self._unseen(last, good - {last}) if self.nodes[one].made() == "-inf"]
        if not makers and self.nodes[last].name in _ADDS_UP:  # it was given from outside
            return last, ""
        return None if not makers or last in makers else (min(makers), "-inf")

    def _inputs_are_known(self, producer: int) -> bool:
        """Whether all that the operator computed from was kept, or is a parameter, or was computed by operators of
        which the same is so. What was kept is good: it was read before anything bad was."""
        waiting, seen = [producer], {producer}
        while waiting:
            node = self.nodes[waiting.pop()]
            kept = {_PLACES.get(one.name, -2) + (node.name in _ADDED_TO) for one in node.kept}
            makers = {one.maker for one in node.kept}
            for number, before in enumerate(node.inputs):
                if number in kept or isinstance(before, str) or (before is not None and before in makers):
                    continue
                if before is None:
                    return False
                if before not in seen:
                    seen.add(before)
                    waiting.append(before)
        return True

    def _locate(self, at: int | None, found: OperatorFound) -> None:
        """Between the uses of which parameters the operator is, and of which it is one itself."""
        if at is None:
            return
        own = [*self._parameters_of(at)]
        if own and self.nodes[at].name != _COMPILED:  # to which all parameters of the model are handed
            found["of"] = own[0]
        before = [name for place in range(at) for name in self._parameters_of(place)]
        if before:
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


# Which input an operator keeps under which name; the first of these operators is what the product is added to.
_PLACES = {
    "self": 0, "input": 0, "mat1": 0, "batch1": 0, "tensor1": 0, "query": 0,
    "other": 1, "weight": 1, "mat2": 1, "batch2": 1, "tensor2": 1, "key": 1, "value": 2,
}  # fmt: skip
_ADDED_TO = ("Addmm", "Addbmm", "Baddbmm", "Addcmul", "Addcdiv")


def read_graph(
    loss: torch.Tensor,
    names: Mapping[int, str],
    buffers: Mapping[int, str] | None = None,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> Graph | None:
    """Notes the graph of a loss. names: parameters by id(); buffers: the same of these. None where it cannot be read:
    there is none, it is too large, it takes too long, or somebody's hooks keep its tensors elsewhere."""
    nodes = _nodes(loss.grad_fn) if loss.grad_fn is not None else None
    if nodes is None:
        return None
    nodes.sort(key=lambda node: node._sequence_nr())
    places = {node: place for place, node in enumerate(nodes)}
    graph, ranges, until, buffers = Graph(), _Ranges(), clock() + MOST_S, buffers or {}
    for node in nodes:
        saved = _saved(node)
        if saved is None or clock() > until:
            return None
        kept = [Kept(name, places.get(_made_by(one)), buffers.get(id(one), "")) for name, one in saved]
        if not ranges.are_bad:  # what follows is its consequence
            for one, (_, tensor) in zip(kept, saved, strict=True):
                ranges.add(one, tensor)
        inputs = [_source(before, places, names) for before, _ in node.next_functions]
        exponent = getattr(node, "_saved_exponent", 0.0)
        graph.nodes.append(Node(_name(node), inputs, kept, exponent if isinstance(exponent, (int, float)) else 0.0))
    ranges.add(graph.loss, loss.detach())
    graph.readings = ranges.collect()
    return graph


class _Ranges:
    """Takes the ranges of tensors: on the CPU at once, on a device later."""

    def __init__(self) -> None:
        self._later: dict[tuple[Any, Any], list[tuple[Kept, Any, Any]]] = {}
        self.are_bad = False

    def add(self, kept: Kept, tensor: torch.Tensor) -> None:
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
            self.are_bad = self.are_bad or kept.is_bad
        else:
            self._later.setdefault((low.device, low.dtype), []).append((kept, low, high))

    def collect(self) -> list[tuple[list[Kept], Reading]]:
        torch = sys.modules["torch"]
        found = []
        for same in self._later.values():
            reading = collect(torch.stack([one for _, *both in same for one in both]))
            if reading is not None:
                found.append(([kept for kept, _, _ in same], reading))
        return found


def _nodes(start: Any) -> list[Any] | None:
    seen, waiting = {start}, [start]
    while waiting:
        for following, _ in waiting.pop().next_functions:
            if following is not None and following not in seen:
                if len(seen) >= MOST_NODES:
                    return None
                seen.add(following)
                if not hasattr(following, "variable"):  # a leaf has nothing before it
                    waiting.append(following)
    return [node for node in seen if not hasattr(node, "variable")]


def _saved(node: Any) -> list[tuple[str, torch.Tensor]] | None:
    """The tensors that a node keeps, by name. None where hooks hold one of them: to read it would call them (activation
    checkpointing would run the model again, and what offloading gives back once is then missing in backward)."""
    torch = sys.modules["torch"]
    found: list[tuple[str, Any]] = []
    unread = _UNREAD_IN_TRAINING if getattr(node, "_saved_training", False) else ()
    for attribute in dir(node):
        # the latter: a function of the user's
        if not attribute.startswith("_raw_saved_") or attribute == "_raw_saved_tensors":
            continue
        name = attribute.removeprefix("_raw_saved_")
        if name in unread:
            continue
        try:
            kept = getattr(node, attribute)
            if any(map(is_packed, _each(kept))):
                return None
            value = getattr(node, attribute.removeprefix("_raw"))
        except RuntimeError:  # released, or changed in place since
            continue
        found += [(name, item) for item in _each(value) if isinstance(item, torch.Tensor)]
    return found


def _each(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def _source(before: Any, places: Mapping[Any, int], names: Mapping[int, str]) -> int | str | None:
    return names.get(id(before.variable)) if hasattr(before, "variable") else places.get(before)


def _made_by(kept: torch.Tensor) -> Any:
    """What made a tensor that some operator kept; None where it was given from outside: a batch, a number, a parameter,
    or one that is only turned or cast, as by the T of a linear layer's weight."""
    maker = kept.grad_fn
    is_view = maker is not None and len(maker.next_functions) == 1 and hasattr(maker.next_functions[0][0], "variable")
    return None if is_view else maker


def leaves_of(loss: torch.Tensor) -> set[int] | None:
    """The parameters, by id(), that a loss was computed from; None where its graph is too large."""
    nodes = _nodes(loss.grad_fn) if loss.grad_fn is not None else None
    if nodes is None:
        return None
    leaves = (before for node in nodes for before, _ in node.next_functions if hasattr(before, "variable"))
    return {id(leaf.variable) for leaf in leaves}


def _name(node: Any) -> str:
    return str(node.name()).removesuffix("0").removesuffix("Backward")
