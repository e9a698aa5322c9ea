"""Reads how many samples and tokens a batch holds, from its shape alone.

Tried on 23 kinds of batches. The rules, in order: a PyG batch's `num_graphs`; a packed sequence's first batch size; a
list of dicts has one sample per entry; a two-dimensional `input_ids`; several names that end in `_input_ids` (a question
and its answer), which are one sample and add up in tokens; else the first dimension that all, or most, tensors share.

If the loader's batch size differs from that: a list with as many entries has those as samples; a list of mappings with
as many rows has those rows; if all tensors have that size, some of them in the second dimension, time comes first. In a
list of tensors that all have one row per label, the tensors are views of one batch. An object of the script's own counts
by its attributes, if it has as many samples as the loader's batch size, or all its tensors have as many rows: otherwise
the rows may be points or nodes. Whatever remains unclear is None, never a guess. Tokens include padding; nested tensors
have none. Nothing here reads a tensor's values.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any

from perfagent.signals.batch_inputs import Inputs, Shape, inputs
from perfagent.signals.batch_padding import TOKENS

__all__ = ["Inputs", "Measure", "Shape", "Size", "has_embedding", "inputs", "is_raw", "of_raw", "reader", "size_of"]

Size = tuple[int | None, int | None, bool]
"""samples, tokens, and whether the tokens count only for a model that has an embedding (two integer matrices of one
shape). If that is True without tokens, the loop makes tokens from the batch."""
Measure = Callable[[Any], Size]

NOTHING: Size = (None, None, False)
_TEXT = "_input_ids"
"""Ending of the names of several texts: a question and its answer, as sentence-transformers batches them."""


def _tensor(value: Any) -> bool:
    return isinstance(value, sys.modules["torch"].Tensor)


def _integers(tensor: Any) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex() and tensor.dtype is not sys.modules["torch"].bool


def size_of(batch: Any) -> Size:
    """Returns samples and tokens of one batch in 3 to 15 µs; `reader` makes that cheap for a loader's later batches."""
    graphs = _asked(batch, "num_graphs")
    if isinstance(graphs, int):
        return graphs, None, False
    if _tensor(batch):
        if batch.dim() == 0:
            return NOTHING
        return int(batch.size(0)), int(batch.numel()) if batch.dim() == 2 and _integers(batch) else None, True
    sizes = _asked(batch, "batch_sizes")
    if sizes is not None and hasattr(type(batch), "sorted_indices") and _tensor(sizes):
        return int(sizes.max()), None, False  # a packed sequence keeps its batch sizes on the CPU
    if isinstance(batch, Mapping):
        return _of_mapping(batch)
    if isinstance(batch, (list, tuple)) and batch:
        return _of_sequence(batch)
    attributes = _attributes(batch)
    size = _of_mapping(attributes) if attributes else NOTHING
    return size if size[1] is not None or (attributes and _same_rows(attributes.values()) is not None) else NOTHING


def is_raw(batch: Any) -> bool:
    """True if the batch holds texts, or mappings with texts, from which the loop makes tokens."""
    items = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else ()
    for item in islice(items, 2):
        first = next(iter(item), None) if isinstance(item, (list, tuple)) else item
        if any(isinstance(one, str) for one in (first.values() if isinstance(first, Mapping) else [first])):
            return True
    return False


def of_raw(measure: Measure) -> Measure:
    """Returns the measure for a loader of such batches."""

    def measured(batch: Any) -> Size:
        samples, tokens, only_with_embedding = measure(batch)
        return samples, tokens, only_with_embedding or tokens is None

    return measured


def _attributes(batch: Any) -> Mapping[str, Any] | None:
    """Returns the attributes of an object that holds a batch's tensors; None if it holds none."""
    if isinstance(batch, (Mapping, list, tuple, type)) or _tensor(batch):
        return None
    # slots
    attributes = _own(batch) or {name: _asked(batch, name) for name in getattr(type(batch), "__dataclass_fields__", ())}
    return attributes if any(map(_tensor, attributes.values())) else None


def _own(batch: Any) -> dict[str, Any]:
    found = getattr(batch, "__dict__", None)
    return found if type(found) is dict else {}


def _asked(batch: Any, name: str) -> Any:
    """Returns an attribute of a batch; None if it has none of that name, or if a property of the script's raises. Never
    calls a `__getattr__` of the script's."""
    try:
        return getattr(batch, name) if hasattr(type(batch), name) or name in _own(batch) else None
    except Exception:  # noqa: BLE001 - a property of the script's may raise anything
        return None


def _of_mapping(batch: Mapping[Any, Any]) -> Size:
    for key in TOKENS:
        ids = batch.get(key)
        if ids is not None and _tensor(ids) and _integers(ids):
            if ids.dim() == 2:
                return int(ids.size(0)), int(ids.numel()), False
            if ids.dim() == 1:
                return None, int(ids.numel()), False  # packed into one row: the number of samples is not in its shape
    texts = _texts(batch)
    if texts and len(rows := {int(batch[key].size(0)) for key in texts}) == 1:
        return rows.pop(), sum(int(batch[key].numel()) for key in texts), False
    for inner in batch.values():
        if isinstance(inner, Mapping):
            size = _of_mapping(inner)
            if size[1] is not None:
                return size
    return _shared_dimension([value for value in batch.values() if _tensor(value)]), None, False


def _texts(batch: Mapping[Any, Any]) -> list[Any]:
    """Returns the keys of token ids, for texts that each have a name."""
    named = [key for key in batch if isinstance(key, str) and key.endswith(_TEXT)]
    return [key for key in named if _tensor(batch[key]) and batch[key].dim() == 2 and _integers(batch[key])]


def _of_sequence(batch: list[Any] | tuple[Any, ...]) -> Size:
    if all(isinstance(item, Mapping) for item in batch):
        return (len(batch), None, False) if isinstance(batch, list) or len(batch) > 1 else _of_mapping(batch[0])
    first = batch[0]
    if isinstance(first, list) and first and all(map(_tensor, first)):
        rows = _same_rows(first)
        labeled = any(_rows(item) == rows for item in batch[1:] if rows is not None)
        return rows if labeled else len(first), None, False  # otherwise detection: (list of images, list of targets)
    if isinstance(first, Mapping):
        return _of_mapping(first)
    if len(batch) == 1 and _tensor(first):
        return size_of(first)
    tensors = [item for item in batch if _tensor(item)]
    if not tensors:
        return size_of(first) if isinstance(first, (tuple, list)) and first is not batch else NOTHING
    if len(tensors) >= 2 and tensors[0].dim() == 2 and all(map(_integers, tensors[:2])) and _alike(*tensors[:2]):
        return int(tensors[0].size(0)), int(tensors[0].numel()), True
    return _shared_dimension(tensors), None, False


def _shared_dimension(tensors: list[Any]) -> int | None:
    firsts = Counter(int(tensor.size(0)) for tensor in tensors if tensor.dim() > 0)
    if not firsts:
        return None
    size, votes = firsts.most_common(1)[0]
    return size if 2 * votes > sum(firsts.values()) else None


def _alike(one: Any, other: Any) -> bool:
    if one.is_nested or other.is_nested:
        return bool(one.is_nested and other.is_nested and one.size(0) == other.size(0) and one.numel() == other.numel())
    return bool(one.shape == other.shape)


def _same_rows(values: Iterable[Any]) -> int | None:
    """Returns how many rows each of these tensors has; None if they differ."""
    rows = {int(one.size(0)) for one in values if _tensor(one) and one.dim()}
    return rows.pop() if len(rows) == 1 else None


def reader(batch: Any, batch_size: Any = None) -> Measure:
    """Returns a cheap measure for batches like this one. It looks at one tensor only: the largest, unless
    tokens are known.

    The measure falls back to `size_of` if a later batch lacks that tensor. batch_size: the loader's batch size; it
    decides if the shapes differ from it and the batch has as many entries.
    """
    samples, tokens, embedded = size_of(batch)
    attributes = None if isinstance(_asked(batch, "num_graphs"), int) else _attributes(batch)
    if attributes:
        return _of_object(type(batch), attributes, batch_size)
    if samples != batch_size and isinstance(batch, (list, tuple)) and batch:
        if len(batch) == batch_size and not (batch_size == 1 and _tensor(batch[0])):  # one tensor may be a batch
            return _of_list(type(batch), len)
        inner = type(batch[0])
        if isinstance(batch[0], (list, tuple)) and len(batch[0]) == batch_size:
            return _of_list(type(batch), lambda later: len(later[0]) if type(later[0]) is inner else None)
        if isinstance(batch[0], list) and batch[0] and _same_rows(batch[0]) == batch_size:  # one row a sample in each
            return _of_list(type(batch), lambda later: _same_rows(later[0]) if isinstance(later[0], list) else None)
        if all(isinstance(part, Mapping) for part in batch):
            sizes = [_of_mapping(part) for part in batch]
            if {size[0] for size in sizes} - {None} == {batch_size}:
                return _of_mappings(batch, sizes, batch_size)
    if samples != batch_size and isinstance(batch, (Mapping, list, tuple)):
        behind_time = _behind_time(batch, batch_size)
        if behind_time is not None:
            return _of_second(type(batch), behind_time, tokens=tokens is not None, embedded=embedded)
    if _tensor(batch) and samples is not None and not batch.is_nested:
        return _of_tensor(batch)
    key = None if samples is None else _largest(batch, samples) if tokens is None else _with_tokens(batch, samples)
    if key is None:
        texts = _texts(batch) if tokens is not None and isinstance(batch, Mapping) else []
        whole = texts and not any(batch[text].is_nested for text in texts)
        return _of_texts(type(batch), texts, frozenset(batch)) if whole else _unclear
    return _of_largest(type(batch), key) if tokens is None else _of_tokens(type(batch), key, embedded=embedded)


def _of_tokens(kind: Any, key: Any, *, embedded: bool) -> Measure:
    def measure(later: Any) -> Size:
        if type(later) is not kind:
            return _unclear(later)
        if inputs.latest is not None:
            inputs.turn_to(None)
        try:
            rows, length = later[key].shape
        except (AttributeError, IndexError, KeyError, TypeError, ValueError):
            return _unclear(later)
        return rows, rows * length, embedded

    return measure


def _of_texts(kind: Any, keys: list[Any], names: frozenset[Any]) -> Measure:
    """Measures batches with texts under several names. names: all names in the batch; with other names there
    may be more texts."""

    def measure(later: Any) -> Size:
        if type(later) is not kind or later.keys() != names:
            return _unclear(later)
        if inputs.latest is not None:
            inputs.turn_to(None)
        samples, tokens = None, 0
        try:
            for key in keys:
                rows, length = later[key].shape
                if samples not in (None, rows):
                    return _unclear(later)
                samples, tokens = rows, tokens + rows * length
        except (AttributeError, IndexError, KeyError, TypeError, ValueError):
            return _unclear(later)
        return samples, tokens, False

    return measure


def _of_largest(kind: Any, key: Any) -> Measure:
    """Reads the shape and reuses the size while the shape stays the same, which costs nothing."""
    shape: Any = None
    size = NOTHING

    def measure(later: Any) -> Size:
        nonlocal shape, size
        if type(later) is not kind:
            return _unclear(later)
        try:
            seen = later[key].shape
            if seen != shape:
                shape, size = seen, (seen[0], None, False)
        except (AttributeError, IndexError, KeyError, TypeError):
            return _unclear(later)
        if inputs.latest is not shape:
            inputs.turn_to(shape)
        return size

    return measure


def _of_second(kind: Any, key: Any, *, tokens: bool, embedded: bool) -> Measure:
    """Measures batches with time before the samples. Reuses the size while the shape stays the same."""
    shape: Any = None
    told: Any = None

    def read(later: Any) -> tuple[Size, Any]:
        nonlocal shape, told
        seen = later[key].shape
        if seen != shape:
            shape = seen
            told = (
                (seen[1], math.prod(seen) if tokens else None, embedded),
                None if tokens else (seen[1], seen[0], *seen[2:]),
            )
        return told  # type: ignore[no-any-return]

    return _measure(kind, read)


def _of_list(kind: Any, count: Callable[[Any], int | None]) -> Measure:
    """Measures batches that list their samples, or begin with such a list."""

    def read(later: Any) -> tuple[Size, Any] | None:
        samples = count(later)
        return None if samples is None else ((samples, None, False), None)

    return _measure(kind, read)


def _measure(kind: Any, read: Callable[[Any], tuple[Size, Any] | None]) -> Measure:
    """Measures later batches. read: their size and the shape of the input; None, or an error, if they are unclear."""

    def measure(later: Any) -> Size:
        try:
            found = read(later) if type(later) is kind else None
        except (AttributeError, IndexError, KeyError, TypeError, ValueError):
            found = None
        if found is None:
            return _unclear(later)
        if inputs.latest is not found[1]:
            inputs.turn_to(found[1])
        return found[0]

    return measure


def _of_mappings(first: Any, sizes: list[Size], batch_size: Any) -> Measure:
    """Measures batches of several mappings with one row per sample: inputs and targets, or both sides of a pair. Looks
    at one mapping only, and returns tokens if no other mapping has any. first: a batch; sizes: of its mappings."""
    with_tokens = [place for place, size in enumerate(sizes) if size[1] is not None]
    with_rows = [place for place, size in enumerate(sizes) if size[0] is not None]
    place = max(with_tokens or with_rows, key=lambda place: _numbers(first[place]))
    kind, alone, of_one = type(first), len(with_tokens) == 1, reader(first[place], batch_size)

    def measure(later: Any) -> Size:
        if type(later) is not kind or len(later) <= place:
            return _unclear(later)
        size = of_one(later[place])
        return size if alone or size[1] is None else (size[0], None, False)

    return measure


def _of_object(kind: Any, first: Mapping[str, Any], batch_size: Any) -> Measure:
    """Measures batches that are objects with tensors. first: the attributes of one batch."""
    of_attributes, most = reader(first, batch_size), batch_size if type(batch_size) is int else None
    samples, tokens, _ = of_attributes(first)
    sure = samples in (None, most) if most is not None else tokens is not None or _same_rows(first.values()) is not None
    if not sure:
        return _nothing

    def measure(later: Any) -> Size:
        attributes = _attributes(later) if type(later) is kind else None
        if not attributes:
            return _unclear(later)
        size = of_attributes(attributes)
        return _nothing(later) if most is not None and size[0] is not None and size[0] > most else size

    return measure


def _nothing(_batch: Any) -> Size:
    """Measures batches whose number of samples is not known."""
    if inputs.latest is not None:
        inputs.turn_to(None)
    return NOTHING


def _with_tokens(batch: Any, samples: int) -> Any:
    """Returns where the tokens are in a mapping or sequence; None if no shape shows how many."""
    if isinstance(batch, Mapping):
        key = next((name for name in TOKENS if _rows(batch.get(name)) == samples), None)
        return None if key is None or batch[key].is_nested else key
    return 0 if isinstance(batch, (list, tuple)) and _rows(batch[0]) == samples and not batch[0].is_nested else None


def _behind_time(batch: Any, batch_size: Any) -> Any:
    """Returns where the largest tensor is that has the samples in its second dimension. Every tensor of the mapping or
    sequence must have the loader's batch size in its first or second dimension; otherwise None."""
    if type(batch_size) is not int or batch_size < 2:
        return None
    items = dict(batch) if isinstance(batch, Mapping) else dict(enumerate(batch))
    tensors = {name: item for name, item in items.items() if _tensor(item) and not item.is_nested and item.dim() > 0}
    if not all(batch_size in tensor.shape[:2] for tensor in tensors.values()):
        return None
    firsts = {tensor.shape[0] for tensor in tensors.values()}
    if len(firsts) == 1 and max(firsts) < batch_size:
        return None  # a loader's last batch, or one rank's part: fewer samples, each of as many numbers
    second = [name for name, tensor in tensors.items() if tensor.shape[0] not in (1, batch_size)]  # 1: may be packed
    return max(second, key=lambda name: tensors[name].numel(), default=None)


def _largest(batch: Any, samples: int) -> Any:
    """Returns where the largest item of a mapping or sequence is; None if it is no tensor with one row per sample."""
    if not isinstance(batch, (Mapping, list, tuple)):
        return None
    items = dict(batch) if isinstance(batch, Mapping) else dict(enumerate(batch))
    key = max(items, key=lambda name: _numbers(items[name]))
    return key if _rows(items[key]) == samples and not items[key].is_nested else None


def _numbers(value: Any) -> float:
    """Returns how many numbers a value holds; infinity if that cannot be seen."""
    if _tensor(value):
        return float(value.numel())
    if isinstance(value, Mapping):
        return sum(map(_numbers, value.values()))
    if isinstance(value, (list, tuple)):
        return sum(map(_numbers, value))
    return 0.0 if value is None or isinstance(value, (str, bytes, int, float)) else math.inf


def _unclear(batch: Any) -> Size:
    """Measures batches in which no single tensor shows how large the input is."""
    if inputs.latest is not None:
        inputs.turn_to(None)
    return size_of(batch)


def _of_tensor(batch: Any) -> Measure:
    """Measures batches that are a single tensor; computes the size again only when its shape or type changes."""
    kind, dtype, shape, size = type(batch), batch.dtype, batch.shape, size_of(batch)
    told = shape if size[1] is None else None

    def measure(later: Any) -> Size:
        nonlocal kind, dtype, shape, size, told
        if type(later) is not kind or later.shape != shape or later.dtype is not dtype:
            if not _tensor(later):
                return _unclear(later)
            kind, dtype, shape, size = type(later), later.dtype, later.shape, size_of(later)
            told = shape if size[1] is None else None
        if inputs.latest is not told:
            inputs.turn_to(told)
        return size

    return measure


def _rows(value: Any) -> int | None:
    return int(value.size(0)) if _tensor(value) and value.dim() > 0 else None


def has_embedding(model: Any) -> bool:
    """True if the model has a table of embeddings, so that integer matrices are tokens."""
    embedding = sys.modules["torch"].nn.Embedding
    return any(isinstance(module, embedding) for module in model.modules())
