"""Describes a batch: names, shapes, types, range, and a fingerprint by which the same batch is known again. Nothing of its
content leaves the process but its smallest and largest value and a hash.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

from perfagent.device import Event, Reading, duplicate, fetched, is_captured, reached, read_later
from perfagent.wire.evidence import Batch, BatchTensor, Reason

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["MOST_TENSORS", "Fingerprint", "can_be_counted", "count_nonfinite"]

MOST_TENSORS = 16
HEAD_BYTES = 2**20
"""So much of each tensor is hashed."""
_PIECE = 2**20
"""A mask of so many numbers takes 1 MiB."""


def can_be_counted(tensor: Tensor) -> bool:
    """Whether NaN and infinity can be in it, and torch can detect them: it has no such operators for numbers of eight
    bits."""
    if tensor.layout is not sys.modules["torch"].strided or tensor.device.type == "meta":
        return False
    return bool(tensor.is_complex() or (tensor.is_floating_point() and tensor.element_size() > 1))


def count_nonfinite(tensor: Tensor) -> Any:
    """How many values are NaN or infinite, and how many of them -inf: on its device, piece by piece, since masks of a whole
    activation would be half as large as it, at the peak of the step."""
    torch = sys.modules["torch"]
    bad, below = 0, torch.zeros((), dtype=torch.int64, device=tensor.device)
    for piece in _pieces(tensor):
        bad = (~torch.isfinite(piece)).sum() + bad
        below = below if tensor.is_complex() else (piece == -math.inf).sum() + below
    return torch.stack([bad, below])


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """Views of at most _PIECE numbers each, however they lie in memory."""
    if tensor.numel() <= _PIECE:
        yield tensor
    else:
        for half in tensor.chunk(2, max(range(tensor.dim()), key=tensor.size)):
            yield from _pieces(half)


def _range_of(tensor: Tensor) -> Any:
    """Smallest and largest finite value, how many are NaN or infinite, how many -inf: on its device. Without a finite
    value, inf and -inf."""
    torch, inf = sys.modules["torch"], math.inf
    if can_be_counted(tensor):
        low = torch.stack([piece.nan_to_num(inf, inf, inf).amin() for piece in _pieces(tensor)]).amin()
        high = torch.stack([piece.nan_to_num(-inf, -inf, -inf).amax() for piece in _pieces(tensor)]).amax()
        bad = count_nonfinite(tensor)
    else:
        low, high = torch.aminmax(tensor if tensor.dtype is not torch.bool else tensor.to(torch.uint8))
        bad = torch.zeros(2, device=tensor.device)
    return torch.cat([torch.stack([low.double(), high.double()]), bad.double()])


class _One:
    """One tensor of a batch."""

    def __init__(self, name: str, tensor: Tensor) -> None:
        local: Tensor = getattr(tensor, "_local_tensor", tensor).detach()
        self.shown: BatchTensor = {
            "name": name, "shape": [int(size) for size in tensor.shape], "dtype": str(tensor.dtype).removeprefix("torch."),
            "device": local.device.type,
        }  # fmt: skip
        self._range: Reading | None = None
        self._head: tuple[Tensor, Event | None] | None = None
        torch = sys.modules["torch"]
        if not local.numel() or local.layout is not torch.strided or local.is_meta or is_captured(local):
            return
        head = local.reshape(-1)[: max(1, HEAD_BYTES // local.element_size())]
        with torch.no_grad(), contextlib.suppress(RuntimeError):
            self._head = duplicate(head)
            if not local.is_complex():
                self._range = read_later(_range_of(local))  # raises for unsigned integers, and floats of eight bits

    def ready(self) -> bool:
        return (self._range is None or self._range.ready()) and (self._head is None or reached(self._head[1]))

    def result(self) -> BatchTensor:
        if self._range is not None:
            low, high, bad, below = self._range.values()
            self.shown |= {"nonfinite": int(bad), "minus_infinite": int(below)}
            if low <= high:
                self.shown |= {"min": low, "max": high}
        if self._head is not None:
            with contextlib.suppress(RuntimeError, TimeoutError):  # the device was lost
                raw = bytes(fetched(self._head[0]).view(sys.modules["torch"].uint8).numpy().data)
                self.shown["hash"] = hashlib.blake2b(raw, digest_size=8).hexdigest()
        self._range = self._head = None
        return self.shown


class Fingerprint:
    """The tensors of one batch. step: whose it was; where: how it was found."""

    def __init__(self, step: int, where: Reason, named: Iterable[tuple[str, Tensor]]) -> None:
        self.step, self._where = step, where
        self._parts = [_One(name, tensor) for name, tensor in islice(named, MOST_TENSORS)]

    def ready(self) -> bool:
        """Never blocks."""
        return all(part.ready() for part in self._parts)

    def result(self) -> Batch:
        """{"step", "from", "hash", "tensors": [{"name", "shape", "dtype", "nonfinite", "minus_infinite", "min",
        "max", "hash"}]}, once ready."""
        tensors = [part.result() for part in self._parts]
        whole = hashlib.blake2b(digest_size=8)
        for tensor in tensors:
            whole.update(f"{tensor['shape']}{tensor['dtype']}{tensor.get('hash', '')}".encode())
        return {"step": self.step, "from": self._where, "hash": whole.hexdigest(), "tensors": tensors}
