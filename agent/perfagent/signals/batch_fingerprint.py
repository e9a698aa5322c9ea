"""A fingerprint by which the same batch is known again within this process: some bytes of some tensors, hashed.

At most 64 numbers of a tensor are read, evenly spaced, of each the byte that differs most: one call in C, 1 µs for a
tensor in the caches and 10 µs for one in none of them. (torch's own `tensor[::n].tolist()` takes 5 and 30.) Of those
bytes at least a few must not be alike; a batch of four rows and two columns, or of nothing but zeros, has no
fingerprint. Then two batches that differ have the same one only if they agree in every number that is read.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from perfagent.signals.batch_tensors import Path, reached

__all__ = ["Fingerprint", "informative", "sampled"]

_NUMBERS = 64
_LEAST_INFORMATIVE = 12
"""Fewest such bytes, of all tensors together."""


class Fingerprint:
    """Makes the fingerprints of batches that have these tensors, given with their places."""

    __slots__ = ("_memory", "_numbers", "_tensor", "paths")

    def __init__(self, places: list[tuple[Path, Any]]) -> None:
        self._tensor: Any = sys.modules["torch"].Tensor
        self._memory = _memory()
        self.paths = [path for path, _ in places]
        self._numbers = [(*_one(path), _begin(tensor), tensor.element_size()) for path, tensor in places]

    def of(self, batch: Any) -> int | None:
        """Returns the fingerprint; None if too little of the batch can be told apart. Raises LookupError or TypeError for
        a batch of another structure. Written out, since a call costs microseconds with cold caches."""
        sample = b""
        for get, key, begin, width in self._numbers:
            tensor = get(batch, key)
            if type(tensor) is not self._tensor or not tensor.is_cpu or not tensor.is_contiguous():
                continue
            size = tensor.nbytes
            if tensor.untyped_storage().nbytes() < size + tensor.storage_offset() * width:
                continue  # freed, as in `sampled`
            stride = (size // (_NUMBERS * width) | 1) * width  # an odd number: not the same column of each row
            sample += self._memory.from_address(tensor.data_ptr())[begin:size:stride]
        if len(sample) - max(sample.count(0), sample.count(sample[:1])) < _LEAST_INFORMATIVE:
            return None
        return hash(sample)


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
    numbers: bytes = _memory().from_address(tensor.data_ptr())[_begin(tensor) : size : stride]
    return numbers


def informative(sample: bytes) -> int:
    """Returns how many bytes of a sample are neither zero nor like the first one."""
    return len(sample) - max(sample.count(0), sample.count(sample[:1])) if sample else 0


@functools.cache
def _memory() -> Any:
    """The memory of any tensor: one type for all sizes, since ctypes makes a class for each."""
    import ctypes  # torch imported it long before

    return ctypes.c_char * sys.maxsize


def _begin(tensor: Any) -> int:
    """Returns which byte of a number to read: of integers the lowest, of floats that with the end of the exponent and
    the begin of the mantissa."""
    if not tensor.is_floating_point() or tensor.dtype is sys.modules["torch"].bfloat16:
        return 0
    return max(1, int(tensor.element_size()) - 2)


def _one(path: Path) -> tuple[Any, Any]:
    """Returns the one function and key that reach a place."""
    return path[0] if len(path) == 1 else (reached, path)
