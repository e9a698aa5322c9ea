"""Counts how many places of a batch of sequences are padding.

Where it is known, in this order: a mask that says which tokens are real (`attention_mask`, or what other names have
one for each token); a mask of the padding itself (`src_key_padding_mask`, with torch's meaning: True is padding); the
lengths of the sequences; the token that the model's embedding or its configuration calls padding. Labels of -100 say
what the loss leaves out, not what is padding. Whatever remains unclear is not counted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from perfagent.signals.batches.places import TOKENS, Path, Place, reached

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["MOST_NUMBERS", "Real", "has_embedding", "pad_id_of", "real_tokens_of", "some_rows"]

Real = Callable[[object, int], "tuple[Tensor, int] | None"]
"""Returns how many tokens of each row of a batch are real, and how many places a row has; None while that is unclear.
Of a batch with more than so many numbers: of some rows. Raises LookupError, TypeError or ValueError for a batch of
another structure."""
MOST_NUMBERS = 2**17
_MASK = "attention_mask"
_OTHER_MASKS = frozenset(("mask", "input_mask", "token_mask", "sequence_mask", "src_mask"))
_LENGTHS = ("length", "lengths", "seq_len", "seq_lens", "seq_length", "seq_lengths", "lens")
_NOT_OF_THE_INPUT = ("target", "label", "output")
_LEAST_WIDTHS = 3
"""Numbers without a name are lengths if the widest sequence is as long as the batch wide, for so many widths."""


def real_tokens_of(places: Sequence[Place], pad_id: Callable[[], int | None]) -> Real | None:
    """Returns how to tell tokens from padding in batches with tensors in these places; None if that cannot be known.
    pad_id: of the model, once it is known."""
    torch = sys.modules["torch"]
    matrices = [place for place in places if place.tensor.dim() == 2]
    if masks := [place.path for place in matrices if place.name.endswith(_MASK)][:4]:
        return lambda batch, most: _counted(torch.cat([reached(batch, path) for path in masks], 1), most)
    tokens = _tokens(matrices)
    for place in matrices:
        if place.name in _OTHER_MASKS and tokens is not None and place.tensor.shape == tokens.tensor.shape:
            return _by_mask_of_either_kind(place.path)
        if place.name.endswith("padding_mask") and place.tensor.dtype is torch.bool:
            return lambda batch, most, path=place.path: _counted(~reached(batch, path), most)  # type: ignore[misc]
    wide = (place for place in places if place.tensor.dim() > 1)
    whole = max(wide, key=lambda place: place.tensor.numel(), default=None)
    lengths = None if whole is None else _lengths(places, whole)
    if whole is not None and lengths is not None:
        return _ByLengths(whole.path, lengths.path, named=bool(lengths.name))
    if tokens is None:
        return None

    def by_token(batch: object, most: int) -> tuple[Tensor, int] | None:
        padding = pad_id()
        return None if padding is None else _counted(some_rows(reached(batch, tokens.path), most) != padding, most)

    return by_token


def some_rows(matrix: Tensor, most: int = MOST_NUMBERS) -> Tensor:
    """Returns the rows of a matrix; of one with more numbers, some of them."""
    return matrix[:: -(-matrix.numel() // most) or 1]


def pad_id_of(model: nn.Module) -> int | None:
    """Returns the token that a model calls padding. Looks at each module once: 1 ms for a thousand."""
    told = getattr(getattr(model, "config", None), "pad_token_id", None)
    if type(told) is int:
        return told
    embedding = sys.modules["torch"].nn.Embedding
    known = {module.padding_idx for module in model.modules() if isinstance(module, embedding)} - {None}
    return known.pop() if len(known) == 1 else None


def has_embedding(model: nn.Module) -> bool:
    """True if the model has a table of embeddings, so that integer matrices are tokens."""
    embedding = sys.modules["torch"].nn.Embedding
    return any(isinstance(module, embedding) for module in model.modules())


def _counted(mask: Tensor, most: int) -> tuple[Tensor, int]:
    return some_rows(mask, most).count_nonzero(1), mask.shape[1]


def _by_mask_of_either_kind(path: Path) -> Real:
    """A mask of which the name does not say whether 1 is a token or padding: each sequence begins with a token."""

    def count(batch: object, most: int) -> tuple[Tensor, int] | None:
        mask = reached(batch, path)
        real, width = _counted(mask, most)
        first = int(mask[:, 0].count_nonzero())
        if first == len(mask):
            return real, width
        return (width - real, width) if first == 0 and bool(real.any()) else None

    return count


class _ByLengths:
    """Counts by the lengths of the sequences. named: the script calls them so."""

    __slots__ = ("_lengths", "_off", "_whole", "_widths", "_widths_needed")

    def __init__(self, whole: Path, lengths: Path, *, named: bool) -> None:
        self._whole, self._lengths, self._widths_needed = whole, lengths, 1 if named else _LEAST_WIDTHS
        self._widths: set[int] = set()
        self._off = False

    def __call__(self, batch: object, _most: int) -> tuple[Tensor, int] | None:
        lengths: Tensor = reached(batch, self._lengths)
        width, longest = _width(reached(batch, self._whole), len(lengths)), int(lengths.max())
        # lengths of something else, such as the samples of a recording
        self._off = self._off or longest > width or (longest < width and self._widths_needed > 1)
        if longest == width:
            self._widths.add(width)
        return None if self._off or len(self._widths) < self._widths_needed else (lengths, width)


def _tokens(matrices: Sequence[Place]) -> Place | None:
    integers = [place for place in matrices if _is_index(place.tensor)]
    named = [place for place in integers if place.name in TOKENS]
    return next(iter(named or [one for one in integers if not one.name and one.position in (-1, 0)]), None)


def _lengths(places: Sequence[Place], whole: Place) -> Place | None:
    found = None
    for place in places:
        tensor, name = place.tensor, place.name.lower()
        if tensor.dim() != 1 or not _is_index(tensor) or len(tensor) not in whole.tensor.shape[:2]:
            continue
        if name.endswith(_LENGTHS) and not name.startswith(_NOT_OF_THE_INPUT):
            return place
        if not name and place.position > 0 and int(tensor.max()) == _width(whole.tensor, len(tensor)):
            found = place
    return found


def _width(whole: Tensor, rows: int) -> int:
    """Time may come first."""
    return whole.shape[1] if whole.shape[0] == rows else whole.shape[0]


def _is_index(tensor: Tensor) -> bool:
    return tensor.dtype in (sys.modules["torch"].int64, sys.modules["torch"].int32)
