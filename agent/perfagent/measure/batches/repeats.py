"""Counts batches that come again within an epoch, by a fingerprint of each: a hash of some of its tensors.

A tensor of at most 4 KiB is read whole, of a larger one about 64 words of 8 bytes, evenly spaced: one call in C, 2 µs
for a tensor in the caches and 10 µs for one in none of them. (torch's own `tensor[::n].tolist()` takes 5 and 30.) Two
batches that differ have the same fingerprint only if they agree in all that is read.

Batches of few possible contents do come again. So a batch has a fingerprint only if some of the numbers that are read
are not alike: one of four rows and two columns, or of nothing but zeros, has none.

A batch counts as repeated if the one before was the same, or if another batch of the same epoch was. An epoch is one
iteration of a loader. In a loader without an end, batches that come again at a constant distance are its next pass over
the data; those that come again at any distance count only once the iteration has ended.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from perfagent.measure.batches.places import Place, reached

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Fingerprint", "Repeats", "content_of", "variety_of"]

_WORDS = 64
_LEAST_VARIETY = 12
"""Fewest numbers that are not alike, of all tensors together: by the byte of each that differs most."""
_WHOLE = 4096
_WORD = 8
_MOST_KNOWN = 2**15
"""Most fingerprints of an epoch (3 MB); then they are forgotten."""
_PASS = 3
"""So many repeats in a row at one distance are a new pass over the data."""


class Fingerprint:
    """Makes the fingerprints of batches that have tensors in these places."""

    __slots__ = ("_parts",)

    def __init__(self, places: Sequence[Place]) -> None:
        self._parts = [(place.path, _telling_bytes(place.tensor)) for place in places]

    def of(self, batch: object) -> int | None:
        """Returns the fingerprint; None if too little of the batch can be told apart. Raises AttributeError, LookupError or
        TypeError for a batch of another structure."""
        contents, variety = [], 0
        for path, telling in self._parts:
            content = content_of(reached(batch, path))
            contents.append(content)
            variety += _variety(content[telling])
        return hash((*contents,)) if variety >= _LEAST_VARIETY else None


def content_of(tensor: Tensor) -> bytes:
    """Returns the numbers of a tensor, or some of them; b"" if they do not lie side by side in host memory.

    Reading what is not there would end the process. Subclasses such as DTensor have no memory of their own, and FSDP2 frees
    the storage of its unsharded parameters (`untyped_storage().resize_(0)`), which may still be held here.
    """
    plain, memory, words = _memory()
    if type(tensor) not in plain or not (tensor.is_cpu and tensor.is_contiguous()):
        return b""
    size = tensor.nbytes
    if tensor.untyped_storage().nbytes() < size + tensor.storage_offset() * tensor.element_size():
        return b""
    if size <= _WHOLE:
        return memory.from_address(tensor.data_ptr())[:size]  # type: ignore[no-any-return]
    return memoryview(words.from_address(tensor.data_ptr()))[: size // _WORD : _spacing(size)].tobytes()


def variety_of(tensor: Tensor) -> int:
    """Returns how many of the numbers that are read of a tensor are not alike."""
    return _variety(content_of(tensor)[_telling_bytes(tensor)])


def _variety(sample: bytes) -> int:
    """How many bytes are neither zero nor like the first one."""
    return len(sample) - max(sample.count(0), sample.count(sample[:1])) if sample else 0


@functools.cache
def _memory() -> tuple[tuple[type, type], Any, Any]:
    """The types of plain tensors, and the memory of any, as bytes and as words: one type for all sizes, since ctypes makes a
    class for each."""
    import ctypes  # torch imported it long before

    torch = sys.modules["torch"]
    return (torch.Tensor, torch.nn.Parameter), ctypes.c_char * sys.maxsize, ctypes.c_uint64 * (sys.maxsize // _WORD)


@functools.lru_cache(maxsize=1024)
def _spacing(size: int) -> int:
    """Every how many words one is read: a prime number, so that it is hardly ever the same column of each row."""
    spacing = max(17, size // _WORD // _WORDS)
    while any(spacing % divisor == 0 for divisor in range(2, math.isqrt(spacing) + 1)):
        spacing += 1
    return spacing


def _telling_bytes(tensor: Tensor) -> slice:
    """Returns which byte of each number tells most: of integers the lowest, of floats that with the end of the exponent and
    the begin of the mantissa."""
    width = tensor.element_size()
    is_lowest = not tensor.is_floating_point() or tensor.dtype is sys.modules["torch"].bfloat16
    return slice(0 if is_lowest else max(1, width - 2), None, width)


class Repeats:
    """The batches of one epoch. count: those that the one before was the same as, and at the end all that came before."""

    def __init__(self) -> None:
        self._known: dict[int, int] = {}  # fingerprint -> number of the batch that had it last
        self.count = self._at_a_distance = 0
        self._distance = self._in_a_row = 0  # of the newest repeat, and how many in a row had it

    @property
    def distinct(self) -> int:
        return len(self._known)

    def note(self, mark: int, number: int, rows: int) -> None:
        """mark: the fingerprint of a batch. number: of the batch, those included that were passed over."""
        before = self._known.get(mark)
        if before is None and len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        self._known[mark] = number
        if before is None:
            self._distance = self._in_a_row = 0
        elif number == before + 1:
            self.count += 1
        elif rows > 1:  # samples one by one may be drawn twice
            self._in_a_row = self._in_a_row + 1 if number - before == self._distance else 1
            self._distance = number - before
            self._at_a_distance += 1
            if self._in_a_row >= _PASS:
                self._at_a_distance = self._distance = self._in_a_row = 0
                self._known = {mark: number}

    def end(self) -> None:
        """The epoch is over."""
        self.count, self._at_a_distance = self.count + self._at_a_distance, 0
