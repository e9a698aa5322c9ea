"""Describes a batch: names, shapes, types, range, and a fingerprint by which the same batch is known again.

A tensor on the CPU is read at once; of one on a device the head is copied behind the work that is queued, and read
later. Nothing of a batch's content leaves the process but its smallest and largest value and a hash.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from types import FrameType
from typing import TYPE_CHECKING, Any

from perfagent.causes.stack_variables import variables_of
from perfagent.device import Event, Reading, reached, read_later, to_host
from perfagent.measure.source_lines import short
from perfagent.wire.evidence import Batch, BatchTensor

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Fingerprint", "can_be_counted", "count_nonfinite", "in_callers", "tensors_in"]

MOST_TENSORS = 16
HEAD_BYTES = 2**20
"""So much of each tensor is hashed."""
MOST_OBJECTS = 1000
"""So many are looked at in one variable: a list of everything that was ever logged is no batch."""
_PIECE = 2**20
"""A mask of so many numbers takes 1 MiB."""
_MOST_FRAMES = 12
"""Of the script's."""
_DEEPEST = 4
_HOLDERS = {"UserDict": "data", "TensorDict": "_tensordict"}
"""Classes that keep what they hold in a dict of their own, as transformers' BatchEncoding does."""
_MOST_IN_ALL = 20_000


def tensors_in(value: object, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of the tensors in nested tuples, lists, dicts and dataclasses, in order. Runs no code of theirs: a
    mapping that reads a file or a database for each item is not asked."""
    return _tensors_in(value, name, 0, iter(range(MOST_OBJECTS)))


def _tensors_in(value: Any, name: str, depth: int, left: Iterator[int]) -> Iterator[tuple[str, Tensor]]:
    kind = type(value)
    if issubclass(kind, sys.modules["torch"].Tensor):
        yield name, value
        return
    by_place = issubclass(kind, (list, tuple))
    for key, item in _items(value, kind) if depth <= _DEEPEST else ():
        if next(left, None) is None:
            return
        inner = str(key) if not name else f"{name}[{key}]" if by_place else f"{name}.{key}"
        yield from _tensors_in(item, inner, depth + 1, left)


def _items(value: Any, kind: type) -> Iterable[tuple[Any, Any]]:
    """What a container holds, read past any method or property of its own."""
    if issubclass(kind, (list, tuple)):
        return enumerate((list if issubclass(kind, list) else tuple).__iter__(value))
    own = getattr(value, "__dict__", {})
    place = next((_HOLDERS[one.__name__] for one in kind.__mro__ if one.__name__ in _HOLDERS), "")
    held = value if issubclass(kind, dict) else own.get(place)
    if isinstance(held, dict):
        return list(islice(dict.items(held), MOST_OBJECTS))  # a copy: another thread may be adding to it
    return [(name, own[name]) for name in getattr(kind, "__dataclass_fields__", ()) if name in own]


def can_be_counted(tensor: Tensor) -> bool:
    """Whether NaN and infinity can be in it, and torch can detect them: it has no such operators for numbers of eight
    bits."""
    if tensor.layout is not sys.modules["torch"].strided or tensor.device.type == "meta":
        return False
    return bool(tensor.is_complex() or (tensor.is_floating_point() and tensor.element_size() > 1))


def count_nonfinite(tensor: Tensor) -> Any:
    """How many values are NaN or infinite, and how many of them -inf, which masks hold in healthy trainings: on its
    device. Piece by piece, since masks of a whole activation would be half as large as it, at the peak of the step."""
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
    """Smallest and largest value, how many are NaN or infinite, how many -inf: on its device."""
    torch = sys.modules["torch"]
    low, high = torch.aminmax(tensor if tensor.dtype is not torch.bool else tensor.to(torch.uint8))
    bad = count_nonfinite(tensor) if can_be_counted(tensor) else torch.zeros(2, device=tensor.device)
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
        if not local.numel() or local.layout is not torch.strided or local.device.type == "meta":
            return
        head = local.reshape(-1)[: max(1, HEAD_BYTES // local.element_size())]
        with torch.no_grad(), contextlib.suppress(RuntimeError):
            self._head = (head.clone(), None) if local.is_cpu else to_host(head)
            if not local.is_complex():
                self._range = read_later(_range_of(local))  # raises for unsigned integers, and floats of eight bits

    def ready(self) -> bool:
        return (self._range is None or self._range.ready()) and (self._head is None or reached(self._head[1]))

    def result(self) -> BatchTensor:
        if self._range is not None:
            low, high, bad, below = self._range.values()
            self.shown |= {"min": low, "max": high, "nonfinite": int(bad), "minus_infinite": int(below)}
        if self._head is not None:
            raw = bytes(self._head[0].contiguous().view(sys.modules["torch"].uint8).numpy().data)
            self.shown["hash"] = hashlib.blake2b(raw, digest_size=8).hexdigest()
        self._range = self._head = None
        return self.shown


class Fingerprint:
    """The tensors of one batch. step: whose it was; where: how it was found."""

    def __init__(self, step: int, where: str, named: Iterable[tuple[str, Tensor]]) -> None:
        self.step, self._where = step, where
        self._parts = [_One(name, tensor) for name, tensor in islice(named, MOST_TENSORS)]

    def __bool__(self) -> bool:
        return bool(self._parts)

    def ready(self) -> bool:
        """Never blocks."""
        return all(part.ready() for part in self._parts)

    def result(self) -> Batch:
        """{"step", "from", "hash", "tensors": [{"name", "shape", "dtype", "min", "max", "nonfinite", "minus_infinite",
        "hash"}]}, once ready."""
        tensors = [part.result() for part in self._parts]
        whole = hashlib.blake2b(digest_size=8)
        for tensor in tensors:
            whole.update(f"{tensor['shape']}{tensor['dtype']}{tensor.get('hash', '')}".encode())
        return {"step": self.step, "from": self._where, "hash": whole.hexdigest(), "tensors": tensors}


def in_callers(samples: int | None, frame: FrameType | None) -> tuple[str, list[tuple[str, Tensor]]]:
    """The batch among the local variables of whoever called backward: tensors without gradients whose first dimension
    is the batch's. Answers where it was found and the named tensors; ("", []) where nothing looks like it."""
    objects, frames = iter(range(_MOST_IN_ALL)), iter(range(_MOST_FRAMES))
    while frame is not None:
        code = frame.f_code
        if not frame.f_globals.get("__name__", "").startswith(("torch.", "perfagent.", "perfagent_loop.")):
            with variables_of(frame) as variables:
                found = _batch_among(variables, samples, objects)
            if found:
                return f"local variables of {code.co_name} ({short(code.co_filename)}:{frame.f_lineno})", found
            if next(frames, None) is None:
                break
        frame = frame.f_back
    return "", []


def _batch_among(
    variables: Iterable[tuple[str, Any]], samples: int | None, left: Iterator[int]
) -> list[tuple[str, Tensor]]:
    """The tensors that may be the batch's. Variables that hold more of them than a batch has come last: a list of all
    batches that the loop iterates over is not the batch of this step."""
    batches: list[tuple[str, Tensor]] = []
    datasets: list[tuple[str, Tensor]] = []
    for name, value in variables:
        if not issubclass(type(value), sys.modules["torch"].nn.Module):
            tensors = _tensors_in(value, name, 0, islice(left, MOST_OBJECTS))
            alike = [*islice((named for named in tensors if _is_batch(named[1], samples)), MOST_TENSORS + 1)]
            (batches if len(alike) <= MOST_TENSORS else datasets).extend(alike)
    return [*batches, *datasets][:MOST_TENSORS]


def _is_batch(tensor: Tensor, samples: int | None) -> bool:
    return not tensor.requires_grad and bool(tensor.dim()) and (samples is None or tensor.shape[0] == samples)
