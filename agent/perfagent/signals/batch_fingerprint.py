"""A fingerprint by which the same batch is known again within this process: a hash of some tensors.

A tensor of at most 4 KiB is read whole, of a larger one about 64 words of 8 bytes, evenly spaced: one call in C, 2 µs
for a tensor in the caches and 10 µs for one in none of them. (torch's own `tensor[::n].tolist()` takes 5 and 30.) Two
batches that differ have the same fingerprint only if they agree in all that is read.

Batches of few possible contents do come again. So a batch has a fingerprint only if some of 64 numbers (or
words) are not alike: one of four rows and two columns, or of nothing but zeros, has none.
"""

from __future__ import annotations

import functools
import math
import sys
from typing import Any

from perfagent.signals.batch_tensors import Path, reached

__all__ = ["Fingerprint", "informative", "sampled"]

_NUMBERS = 64
_LEAST_INFORMATIVE = 12
"""Fewest numbers or words that are not alike, of all tensors together: by the byte of each that differs most."""
_WHOLE = 4096
_WORD = 8


class Fingerprint:
    """Makes the fingerprints of batches that have these tensors, given with their places."""

    __slots__ = ("_memory", "_numbers", "_tensor", "_words", "paths")

    def __init__(self, places: list[tuple[Path, Any]]) -> None:
        self._tensor: Any = sys.modules["torch"].Tensor
        self._memory, self._words = _memory()
        self.paths = [path for path, _ in places]
        self._numbers = [(*_one(path), _begin(tensor), tensor.element_size()) for path, tensor in places]

    def of(self, batch: Any) -> int | None:
        """Returns the fingerprint; None if too little of the batch can be told apart. Raises LookupError or TypeError for
        a batch of another structure. Written out, since a call costs microseconds with cold caches."""
        content: list[bytes] = []
        told = 0
        for get, key, begin, width in self._numbers:
            tensor = get(batch, key)
            if type(tensor) is not self._tensor or not tensor.is_cpu or not tensor.is_contiguous():
                continue
            size = tensor.nbytes
            if tensor.untyped_storage().nbytes() < size + tensor.storage_offset() * width:
                continue  # freed, as in `sampled`
            if size <= _WHOLE:
                read = self._memory.from_address(tensor.data_ptr())[:size]
                told += informative(read[begin :: (size // (_NUMBERS * width) | 1) * width])
            else:
                words = memoryview(self._words.from_address(tensor.data_ptr()))
                read = words[: size // _WORD : _spacing(size)].tobytes()
                told += informative(read[begin::_WORD])
            content.append(read)
        return hash((*content,)) if told >= _LEAST_INFORMATIVE else None


def sampled(tensor: Any) -> bytes:
    """Returns a byte each of some numbers of a tensor; b"" if they do not lie side by side in host memory.

    Reading what is not there would end the process. Subclasses such as DTensor have no memory of their own, and FSDP2 frees
    the storage of its unsharded parameters (`untyped_storage().resize_(0)`), which may still be held here.
    """
    torch = sys.modules["torch"]
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or not (tensor.is_cpu and tensor.is_contiguous()):
        return b""
    size, width = tensor.nbytes, tensor.element_size()
    if tensor.untyped_storage().nbytes() < size + tensor.storage_offset() * width:
        return b""
    stride = (size // (_NUMBERS * width) | 1) * width
    numbers: bytes = _memory()[0].from_address(tensor.data_ptr())[_begin(tensor) : size : stride]
    return numbers


def informative(sample: bytes) -> int:
    """Returns how many bytes of a sample are neither zero nor like the first one."""
    return len(sample) - max(sample.count(0), sample.count(sample[:1])) if sample else 0


@functools.cache
def _memory() -> tuple[Any, Any]:
    """The memory of any tensor, as bytes and as words: one type for all sizes, since ctypes makes a class for each."""
    import ctypes  # torch imported it long before

    return ctypes.c_char * sys.maxsize, ctypes.c_uint64 * (sys.maxsize // _WORD)


@functools.lru_cache(maxsize=1024)
def _spacing(size: int) -> int:
    """Every how many words one is read: a prime number, so that it is hardly ever the same column of each row."""
    spacing = max(17, size // _WORD // _NUMBERS)
    while any(spacing % divisor == 0 for divisor in range(2, math.isqrt(spacing) + 1)):
        spacing += 1
    return spacing


def _begin(tensor: Any) -> int:
    """Returns which byte of a number to read: of integers the lowest, of floats that with the end of the exponent and
    the begin of the mantissa."""
    if not tensor.is_floating_point() or tensor.dtype is sys.modules["torch"].bfloat16:
        return 0
    return max(1, int(tensor.element_size()) - 2)


def _one(path: Path) -> tuple[Any, Any]:
    """Returns the one function and key that reach a place."""
    return path[0] if len(path) == 1 else (reached, path)
