"""Tells tokens from padding in batches of sequences.

Where it is known, in this order: a mask that says which tokens are real (`attention_mask`); a mask of the padding itself
(`src_key_padding_mask`, with torch's meaning: True is padding); the lengths of the sequences, by name; the token that the
model's embedding or its configuration calls padding. Labels of -100 say what the loss leaves out, not what is padding.
Whatever remains unclear is not counted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from perfagent.measure.batches.places import TOKENS, Path, Place, reached

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["Real", "has_embedding", "pad_id_of", "real_tokens_of", "some_rows"]

Counts = tuple["Tensor", int]
"""Real tokens of each row, and places of a row."""
Real = Callable[[object, int], "Counts | None"]
"""Counts in a batch; in one of more than so many numbers, in some rows. None while it is unclear. Raises LookupError,
TypeError or ValueError for a batch of another structure."""
_MASK = "attention_mask"
_LENGTHS = ("length", "lengths", "seq_len", "seq_lens", "seq_length", "seq_lengths", "lens")
_NOT_OF_THE_INPUT = ("target", "label", "output")


def real_tokens_of(places: Sequence[Place], pad_id: Callable[[], int | None]) -> Real | None:
    """Returns how to count the real tokens of batches with tensors in these places; None if that cannot be known.
    pad_id: of the model, once it is known."""
    torch = sys.modules["torch"]
    matrices = [place for place in places if place.tensor.dim() == 2]
    if masks := [place.path for place in matrices if place.name.endswith(_MASK)][:4]:
        return lambda batch, most: _counted(torch.cat([reached(batch, path) for path in masks], 1), most)
    tokens = _tokens(matrices)
    for place in matrices:
        if place.name.endswith("padding_mask") and place.tensor.dtype is torch.bool:
            return lambda batch, most, path=place.path: _counted(~reached(batch, path), most)  # type: ignore[misc]
    whole = max((one for one in places if one.tensor.dim() > 1), key=lambda one: one.tensor.numel(), default=None)
    if whole is not None:
        for place in places:
            name, is_vector = place.name.lower(), place.tensor.dim() == 1 and _is_index(place.tensor)
            is_named = name.endswith(_LENGTHS) and not name.startswith(_NOT_OF_THE_INPUT)
            if is_vector and is_named and len(place.tensor) in whole.tensor.shape[:2]:
                return _by_lengths(whole.path, place.path)
    return None if tokens is None else _by_token(tokens.path, pad_id)


def some_rows(matrix: Tensor, most: int) -> Tensor:
    """Returns the rows of a matrix; of one with more numbers, some of them."""
    return matrix[:: -(-matrix.numel() // most) or 1]


def pad_id_of(model: nn.Module) -> int | None:
    """Returns the token that a model calls padding. Looks at each module once: 1 ms for a thousand."""
    pad_id = getattr(getattr(model, "config", None), "pad_token_id", None)
    if type(pad_id) is int:
        return pad_id
    embedding = sys.modules["torch"].nn.Embedding
    known = {module.padding_idx for module in model.modules() if isinstance(module, embedding)} - {None}
    return known.pop() if len(known) == 1 else None


def has_embedding(model: nn.Module) -> bool:
    """True if the model has a table of embeddings, so that integer matrices are tokens."""
    embedding = sys.modules["torch"].nn.Embedding
    return any(isinstance(module, embedding) for module in model.modules())


def _counted(mask: Tensor, most: int) -> Counts:
    return some_rows(mask, most).count_nonzero(1), mask.shape[1]


def _by_token(path: Path, pad_id: Callable[[], int | None]) -> Real:
    def count(batch: object, most: int) -> Counts | None:
        padding = pad_id()
        return None if padding is None else _counted(some_rows(reached(batch, path), most) != padding, most)

    return count


def _by_lengths(whole: Path, path: Path) -> Real:
    def count(batch: object, _most: int) -> Counts | None:
        lengths: Tensor = reached(batch, path)
        shape = reached(batch, whole).shape
        width = shape[1] if shape[0] == len(lengths) else shape[0]  # time may come first
        return (lengths, width) if int(lengths.max()) <= width else None  # else they are the samples of a recording

    return count


def _tokens(matrices: Sequence[Place]) -> Place | None:
    integers = [place for place in matrices if _is_index(place.tensor)]
    named = [place for place in integers if place.name in TOKENS]
    return next(iter(named or [one for one in integers if not one.name and one.position in (-1, 0)]), None)


def _is_index(tensor: Tensor) -> bool:
    return tensor.dtype in (sys.modules["torch"].int64, sys.modules["torch"].int32)
