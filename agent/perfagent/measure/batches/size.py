"""Reads how many samples and tokens a batch holds, from its shape alone.

Tried on 23 kinds of batches. The rules, in order: a PyG batch's `num_graphs`; a packed sequence's first batch size; a
list of dicts has one sample per entry; a list of tensors beside something else has one per tensor, unless they have as
many rows as the labels: then they are views of one batch; token ids by name; several names that end in `_input_ids` (a
question and its answer), which are one sample and add up in tokens; an integer matrix alone, or two of one shape; else
the first dimension that most of the outermost tensors share.

If the loader's batch size differs from that, the first that has it: the rows of the tensors, the entries of a list or of
its first item, the rows of views without labels, and, where all tensors have that size in one of two dimensions, the
second one, behind the time. An object of the script's own counts by its attributes, if it has as many samples as the
loader's batch size, or all its tensors have as many rows: otherwise the rows may be points or nodes. Whatever remains
unclear is None, never a guess: nested tensors have no size. Tokens include padding. Nothing here reads a tensor's values.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections import Counter, UserDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from operator import attrgetter, getitem, itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from perfagent.libraries import BATCHES_OF_GRAPHS
from perfagent.measure.batches.places import TOKENS, Path, Place, are_integers, places_in, reached
from perfagent.step.state import state

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Inputs", "Measure", "Shape", "Size", "inputs", "is_raw", "reader", "size_of"]

Size = tuple[int | None, int | None, bool]
"""samples, tokens, and whether the tokens count only for a model that has an embedding (integer matrices without a
name). If that is True without tokens, the loop makes tokens from the batch."""
Shape = tuple[int, ...]
Measure = Callable[[Any], Size]
_NO_SIZE = (AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What reading a batch of another structure raises."""
_TEXT = "_input_ids"


class Inputs:
    """When the shape of the input changed, in training and evaluation alike. latest: that of the newest batch, the very object
    that its reader keeps; None if it does not show how large the input is. changes: (steps completed then, shape of one
    sample from there on), the newest few of one run."""

    def __init__(self) -> None:
        self.latest: Shape | None = None
        self.changes: deque[tuple[int, Shape | None]] = deque(maxlen=1024)
        self._completed = 0

    def turn_to(self, shape: Shape | None) -> None:
        """Records a new shape. On the training thread."""
        completed = state.current.completed if state.current is not None else 0
        if completed < self._completed:  # a new run has begun
            self.changes = deque(maxlen=self.changes.maxlen)
        self.latest, self._completed = shape, completed
        self.changes.append((completed, None if shape is None else tuple(shape[1:])))


inputs = Inputs()


class _Rule(NamedTuple):
    """How to read a shape. samples: their dimension, if any. tokens: first of the dimensions whose sizes multiply to the
    tokens, if any. is_made: third part of the size. is_input: whether it is the shape of the input."""

    samples: int | None = 0
    tokens: int | None = None
    is_made: bool = False
    is_input: bool = False

    def read(self, shape: Shape) -> tuple[Size, Shape | None]:
        """Returns the size of the batch, and the shape of its input, samples first, where its size does not say enough."""
        at = self.samples
        samples = None if at is None else shape[at]
        if self.tokens is not None:
            if len(shape) != (1 if at is None else 2):
                raise ValueError(f"tokens are a matrix: {shape}")
            return (samples, math.prod(shape[self.tokens :]), self.is_made), None
        input_shape = (shape[at], *shape[:at], *shape[at + 1 :]) if self.is_input and at is not None else None
        return (samples, None, self.is_made), input_shape


_Candidates = Iterator[tuple[bool, Path, _Rule]]
"""Whether it holds if none has the loader's batch size; where the shape is; and what it says."""


def size_of(batch: object, batch_size: object = None) -> Size:
    """Returns samples and tokens of one batch. batch_size: the loader's; it decides between what the shapes may mean."""
    return _chosen(batch, batch_size)[0]


def reader(batch: object, batch_size: object = None) -> Measure:
    """Returns a cheap measure for batches like this one. It looks at one shape only, that of the largest tensor unless
    tokens are known, and computes the size again when that changes. For a batch of another structure: `size_of`."""
    kind, (size, path, rule) = type(batch), _chosen(batch, batch_size)
    is_direct = path is not None and len(path) == 2 and path[1] == _SHAPE and kind in (dict, list, tuple)
    key: Any = path[0][1] if path is not None and is_direct else None  # nearly all: half the cost of a walk
    first = size
    shape: Shape | None = None
    input_shape: Shape | None = None

    def measure(later: Any) -> Size:
        nonlocal size, shape, input_shape
        try:
            same: Any = later if type(later) is kind else None
            seen: Any = shape
            if path is None and same.shape == ():  # a number: an error would take 8 µs
                size = first
            else:
                seen = same[key].shape if is_direct else reached(same, path)  # type: ignore[arg-type] # None has none
            if seen != shape:
                shape, (size, input_shape) = seen, rule.read(seen)
        except _NO_SIZE:
            size, shape, input_shape = size_of(later, batch_size), None, None
        if inputs.latest is not input_shape:
            inputs.turn_to(input_shape)
        return size

    return measure


def is_raw(batch: object) -> bool:
    """True if the batch holds texts, or mappings with texts, from which the loop makes tokens."""
    items = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else ()
    for item in islice(items, 2):
        first = next(iter(item), None) if isinstance(item, (list, tuple)) else item
        if any(isinstance(one, str) for one in (first.values() if isinstance(first, Mapping) else [first])):
            return True
    return False


def _chosen(batch: object, batch_size: object) -> tuple[Size, Path | None, _Rule]:
    """The size of a batch; and the rule by which a shape shows that of later ones, and where that shape is."""
    wanted, makes_tokens = batch_size if type(batch_size) is int else None, is_raw(batch)
    chosen: tuple[Size, Path | None, _Rule] = (None, None, makes_tokens), None, _Rule()
    for is_sure, path, rule in _candidates(batch, wanted):
        adapted = rule._replace(is_made=True) if makes_tokens and rule.tokens is None else rule
        found = adapted.read(reached(batch, path))[0], path, adapted
        if found[0][0] == wanted or (is_sure and wanted is None):
            return found
        if is_sure and chosen[1] is None:
            chosen = found
    return chosen


def _candidates(batch: Any, batch_size: int | None) -> _Candidates:
    with contextlib.suppress(*_NO_SIZE):  # of a property of the script's
        graphs = attrgetter(BATCHES_OF_GRAPHS)
        if isinstance(graphs(batch), int):
            yield True, ((_number, graphs),), _Rule()
    if isinstance(batch, sys.modules["torch"].nn.utils.rnn.PackedSequence):  # keeps its batch sizes on the CPU
        yield True, ((getattr, "batch_sizes"), (_number, itemgetter(0))), _Rule()
    items = batch if isinstance(batch, (list, tuple)) else ()
    first, views = (items[0], _rows_of_views(items[0])) if items else (None, None)
    if items and all(isinstance(item, Mapping) for item in items) and (isinstance(batch, list) or len(batch) > 1):
        yield True, _ENTRIES, _Rule()
    if views is not None:
        is_labeled = any(_rows(item) == views > 0 for item in items[1:])
        yield True, _FIRST_VIEW if is_labeled else _ENTRIES_OF_FIRST, _Rule()  # else pictures, and their targets
    places = [place for place in places_in(batch) if place.tensor.dim() and not place.tensor.is_nested]
    depth = min((len(place.path) for place in places), default=0)
    outer = [place for place in places if len(place.path) == depth]
    tokens = [*_by_tokens(batch, places, outer)]
    yield from tokens
    yield from _by_rows(batch, places, outer, batch_size)
    if items and not (batch_size == 1 and _rows(first) is not None):  # one tensor may be a batch
        yield False, _ENTRIES, _Rule()
    if isinstance(first, (list, tuple)):
        yield False, _ENTRIES_OF_FIRST, _Rule()
    if views:
        yield False, _FIRST_VIEW, _Rule()
    behind = _behind_time(outer, batch_size or 0)
    if behind is not None:
        yield from ((False, path, rule._replace(samples=1)) for _, path, rule in tokens if rule.samples == 0)
        yield True, (*behind.path, _SHAPE), _Rule(1, is_input=True)


def _by_tokens(batch: Any, places: Sequence[Place], outer: Sequence[Place]) -> _Candidates:
    integers = [place for place in places if are_integers(place.tensor) and place.tensor.dim() <= 2]
    named = sorted(
        (one for one in integers if one.name in TOKENS), key=lambda one: (len(one.path), TOKENS.index(one.name))
    )
    if named and [one.name for one in named].count(named[0].name) == 1:  # else the two sides of a pair
        yield True, (*named[0].path, _SHAPE), _Rule(0 if named[0].tensor.dim() == 2 else None, tokens=0)
    texts = [place for place in integers if place.name.endswith(_TEXT) and len(place.path) == 1]
    if len({_rows(text.tensor) for text in texts}) == 1:
        yield True, ((_texts_in_a_row, None),), _Rule(tokens=0)
    is_alone = len(outer) == 1 and (outer[0].tensor is batch or (isinstance(batch, (list, tuple)) and len(batch) == 1))
    if is_alone or (len(outer) > 1 and isinstance(batch, (list, tuple))):
        one, other = outer[0].tensor, outer[-1 if is_alone else 1].tensor
        if one.dim() == 2 and are_integers(one) and are_integers(other) and one.shape == other.shape:
            yield True, (*outer[0].path, _SHAPE), _Rule(tokens=0, is_made=True)


def _by_rows(batch: Any, places: Sequence[Place], outer: Sequence[Place], batch_size: int | None) -> _Candidates:
    """By the rows that most of the outermost tensors have."""
    counts = Counter(_rows(place.tensor) for place in outer)
    ((rows, votes),) = counts.most_common(1) or [(None, 0)]
    if 2 * votes <= counts.total():
        return
    tensor = sys.modules["torch"].Tensor
    is_object = not isinstance(batch, (tensor, Mapping, list, tuple))
    largest = max(places, key=lambda place: place.tensor.numel())
    if _rows(largest.tensor) == rows:
        rule = _Rule(is_made=isinstance(batch, tensor), is_input=_holds_no_other(batch, largest.tensor))
    else:
        largest, rule = next(place for place in outer if _rows(place.tensor) == rows), _Rule()
    yield not is_object or (batch_size is None and len(counts) == 1), (*largest.path, _SHAPE), rule


def _behind_time(places: Sequence[Place], batch_size: int) -> Place | None:
    """The largest tensor with the samples in its second dimension, if each has the batch size in one of its first two."""
    shapes = [place.tensor.shape for place in places]
    if batch_size < 2 or not all(batch_size in shape[:2] for shape in shapes):
        return None
    firsts = {shape[0] for shape in shapes}
    if len(firsts) == 1 and max(firsts) < batch_size:
        return None  # a loader's last batch, or one rank's part: fewer samples, each of as many numbers
    behind = [place for place in places if place.tensor.shape[0] not in (1, batch_size)]  # 1: may be packed
    return max(behind, key=lambda place: place.tensor.numel(), default=None)


def _number(value: Any, count: Callable[[Any], Any]) -> Shape:
    return (int(count(value)),)


def _texts_in_a_row(batch: Mapping[Any, Any], _key: None) -> Shape:
    """The shape of all texts side by side. Raises ValueError if they are not of as many rows."""
    shapes = [value.shape for name, value in batch.items() if str(name).endswith(_TEXT)]
    (rows,) = {rows for rows, _ in shapes}
    return rows, sum(width for _, width in shapes)


_SHAPE = (getattr, "shape")
_ENTRIES: Path = ((_number, len),)
_ENTRIES_OF_FIRST: Path = ((getitem, 0), (_number, len))
_FIRST_VIEW: Path = ((getitem, 0), (getitem, 0), _SHAPE)


def _rows(value: Any) -> int | None:
    return int(value.size(0)) if isinstance(value, sys.modules["torch"].Tensor) and value.dim() else None


def _rows_of_views(items: object) -> int | None:
    """Returns how many rows each tensor of a list has, 0 if they differ; None if it is no list of tensors."""
    rows = {_rows(item) for item in items} if isinstance(items, list) and items else {None}
    return None if None in rows else rows.pop() if len(rows) == 1 else 0


def _holds_no_other(batch: Any, largest: Tensor) -> bool:
    """Whether nothing else in the batch, such as pictures that are no tensors yet, may be larger."""
    containers = (dict, list, tuple, UserDict) if largest.dim() > 1 else ()
    plain = (sys.modules["torch"].Tensor, str, bytes, int, float, type(None), *containers)
    items = dict.values(batch) if isinstance(batch, dict) else batch if isinstance(batch, (list, tuple)) else ()
    return all(isinstance(item, plain) for item in items)
