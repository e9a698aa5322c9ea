"""Counts how many places of a batch of sequences are padding.

Where it is known, in this order: a mask that says which tokens are real (`attention_mask`, or what other names have
one for each token); a mask of the padding itself (`src_key_padding_mask`, with torch's meaning: True is padding); the
lengths of the sequences; the token that the model's embedding or its configuration calls padding. Labels of -100 say
what the loss leaves out, not what is padding. Whatever remains unclear is not counted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from perfagent.signals.batch_tensors import Path, Place, reached

__all__ = ["TOKENS", "Counts", "count_zeros", "pad_id_of", "padding_of", "some_rows"]

Counts = tuple[int, int]
"""Places of padding, and all places; of a large batch, of some rows."""
TOKENS = ("input_ids", "tokens", "token_ids", "idx", "inputs_ids", "decoder_input_ids")
_MASK = "attention_mask"
_OTHER_MASKS = frozenset(("mask", "input_mask", "token_mask", "sequence_mask", "src_mask"))
_PADDING_MASK = "padding_mask"
_LENGTHS = ("length", "lengths", "seq_len", "seq_lens", "seq_length", "seq_lengths", "lens")
_NOT_OF_THE_INPUT = ("target", "label", "output")
_MOST_NUMBERS = 2**17
_LEAST_WIDTHS = 3
"""Numbers without a name are lengths if the widest sequence is as long as the batch wide, for so many widths."""

Count = Callable[[Any], Counts | None]
"""Counts in a batch. Raises LookupError, TypeError or ValueError for one of another structure."""


def padding_of(places: Sequence[Place], pad_id: int | None) -> Count | None:
    """Returns how to count the padding of batches with tensors in these places; None if that cannot be known. pad_id:
    of the model, if it has one."""
    masks = [place for place in places if place.name.endswith(_MASK) and place.tensor.dim() == 2]
    if masks:
        return _of_masks([place.path for place in masks[:4]])
    tokens = _tokens(places)
    for place in places:
        if place.name in _OTHER_MASKS and tokens is not None and place.tensor.shape == tokens.tensor.shape:
            return _of_mask_of_either_kind(place.path)
        if (
            place.name.endswith(_PADDING_MASK)
            and place.tensor.dim() == 2
            and place.tensor.dtype is sys.modules["torch"].bool
        ):
            return _of_padding_mask(place.path)
    wide = (place for place in places if place.tensor.dim() > 1)
    whole = max(wide, key=lambda place: int(place.tensor.numel()), default=None)
    lengths = None if whole is None else _lengths(places, whole)
    if whole is not None and lengths is not None:
        return _Lengths(whole.path, lengths.path, named=bool(lengths.name))
    if tokens is not None and pad_id is not None:
        return lambda batch: count_zeros(some_rows(reached(batch, tokens.path)) != pad_id)
    return None


def some_rows(matrix: Any) -> Any:
    """Returns the rows of a matrix in host memory; of a large one, some of them."""
    return matrix[:: -(-matrix.numel() // _MOST_NUMBERS) or 1]


def count_zeros(mask: Any) -> Counts:
    """Returns how many numbers of a matrix in host memory are zero, and of how many; of a large one, of some rows."""
    rows = some_rows(mask)
    return rows.numel() - int(sys.modules["torch"].count_nonzero(rows)), rows.numel()


def pad_id_of(model: Any) -> int | None:
    """Returns the token that a model calls padding. Looks at each module once: 1 ms for a thousand."""
    told = getattr(getattr(model, "config", None), "pad_token_id", None)
    if type(told) is int:
        return told
    embedding = sys.modules["torch"].nn.Embedding
    known = {module.padding_idx for module in model.modules() if isinstance(module, embedding)} - {None}
    return known.pop() if len(known) == 1 else None


def _of_masks(paths: Sequence[Path]) -> Count:
    def count(batch: Any) -> Counts:
        counts = [count_zeros(reached(batch, path)) for path in paths]
        return sum(padding for padding, _ in counts), sum(places for _, places in counts)

    return count


def _of_padding_mask(path: Path) -> Count:
    def count(batch: Any) -> Counts:
        real, places = count_zeros(reached(batch, path))
        return places - real, places

    return count


def _of_mask_of_either_kind(path: Path) -> Count:
    """A mask of which the name does not say whether 1 is a token or padding: each sequence begins with a token."""

    def count(batch: Any) -> Counts | None:
        mask = reached(batch, path)
        zeros, places = count_zeros(mask)
        first = int(sys.modules["torch"].count_nonzero(mask[:, 0]))
        if first == len(mask):
            return zeros, places
        return (places - zeros, places) if first == 0 and zeros < places else None

    return count


class _Lengths:
    """Counts by the lengths of the sequences. named: the script calls them so."""

    __slots__ = ("_lengths", "_named", "_off", "_whole", "_widths")

    def __init__(self, whole: Path, lengths: Path, *, named: bool) -> None:
        self._whole, self._lengths, self._named = whole, lengths, named
        self._widths: set[int] = set()
        self._off = False

    def __call__(self, batch: Any) -> Counts | None:
        if self._off:
            return None
        lengths, whole = reached(batch, self._lengths), reached(batch, self._whole)
        rows = len(lengths)
        width = _width(whole, rows)
        real, longest = int(lengths.sum()), int(lengths.max())
        if longest > width or (longest < width and not self._named):
            self._off = True  # lengths of something else, such as the samples of a recording
            return None
        if longest == width:
            self._widths.add(width)
        if len(self._widths) < (1 if self._named else _LEAST_WIDTHS):
            return None
        return rows * width - real, rows * width


def _tokens(places: Sequence[Place]) -> Place | None:
    named = [place for place in places if place.name in TOKENS and _is_matrix(place)]
    alone = [place for place in places if not place.name and place.position in (-1, 0) and _is_matrix(place)]
    return next(iter((*named, *alone)), None)


def _lengths(places: Sequence[Place], whole: Place) -> Place | None:
    found = None
    for place in places:
        tensor = place.tensor
        if tensor.dim() != 1 or not _is_integer(tensor) or len(tensor) not in whole.tensor.shape[:2]:
            continue
        name = place.name.lower()
        if name.endswith(_LENGTHS) and not name.startswith(_NOT_OF_THE_INPUT):
            return place
        if not name and place.position > 0 and int(tensor.max()) == _width(whole.tensor, len(tensor)):
            found = place
    return found


def _width(whole: Any, rows: int) -> int:
    """Time may come first."""
    return int(whole.shape[1] if whole.shape[0] == rows else whole.shape[0])


def _is_matrix(place: Place) -> bool:
    return place.tensor.dim() == 2 and _is_integer(place.tensor)


def _is_integer(tensor: Any) -> bool:
    torch: Any = sys.modules["torch"]
    return tensor.dtype in (torch.int64, torch.int32)
