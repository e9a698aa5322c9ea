"""Describes a batch: names, shapes, types, range, and a fingerprint by which the same batch is known again.

A tensor on the CPU is read at once; of one on a device the head is copied behind the work that is queued, and read
later. Nothing of a batch's content leaves the process but its smallest and largest value and a hash.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import sys
from collections import UserDict
from collections.abc import Iterable, Iterator
from itertools import islice
from types import FrameType, MemberDescriptorType
from typing import Any

from perfagent.device import Reading, collect, reached, to_host
from perfagent.rootcause.stack_variables import variables_of
from perfagent.signals.source_lines import short
from perfagent.wire.evidence import Batch, BatchTensor

__all__ = ["Fingerprint", "can_be_counted", "count_nonfinite", "in_callers", "tensors_in"]

MOST_TENSORS = 16
HEAD_BYTES = 2**20
"""So much of each tensor is hashed."""
MOST_OBJECTS = 1000
"""So many are looked at in one variable: a list of everything that was ever logged is no batch."""
_PIECE = 2**20
"""A mask of so many numbers takes 1 MiB."""
_MOST_FRAMES = 12
_MOST_IN_ALL = 20_000


def tensors_in(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """(name, tensor) of the tensors in nested tuples, lists, dicts and dataclasses, in order. Runs no code of theirs: a
    mapping that reads a file or a database for each item is not asked."""
    return _tensors_in(value, name, 0, iter(range(MOST_OBJECTS)))


def _tensors_in(value: Any, name: str, depth: int, left: Iterator[int]) -> Iterator[tuple[str, Any]]:
    kind = type(value)
    if issubclass(kind, sys.modules["torch"].Tensor):
        yield name, value
        return
    if depth > 4:
        return
    by_place = issubclass(kind, (list, tuple))
    for key, item in _items(value, kind):
        if next(left, None) is None:
            return
        inner = str(key) if not name else f"{name}[{key}]" if by_place else f"{name}.{key}"
        yield from _tensors_in(item, inner, depth + 1, left)


def _items(value: Any, kind: type) -> Iterable[tuple[Any, Any]]:
    """What a container holds, read past any method or property of its own."""
    if issubclass(kind, dict):
        return list(islice(dict.items(value), MOST_OBJECTS))  # a copy: another thread may be adding to it
    if issubclass(kind, UserDict):  # transformers' BatchEncoding
        return _items_of(vars(value).get("data"))
    if issubclass(kind, list):
        return enumerate(list.__iter__(value))
    if issubclass(kind, tuple):
        return enumerate(tuple.__iter__(value))
    if kind.__name__ == "TensorDict" and kind.__module__.startswith("tensordict."):
        return _items_of(vars(value).get("_tensordict"))
    fields = getattr(kind, "__dataclass_fields__", None)
    return _fields(value, kind, fields) if isinstance(fields, dict) else ()


def _items_of(held: Any) -> Iterable[tuple[Any, Any]]:
    return _items(held, type(held)) if isinstance(held, dict) else ()


def _fields(value: Any, kind: type, names: Iterable[str]) -> Iterator[tuple[str, Any]]:
    held = vars(value) if hasattr(value, "__dict__") else {}
    for name in names:
        if name in held:
            yield name, held[name]
        elif type(slot := getattr(kind, name, None)) is MemberDescriptorType:
            try:
                yield name, slot.__get__(value)
            except AttributeError:  # not set
                continue


def can_be_counted(tensor: Any) -> bool:
    """Whether NaN and infinity can be in it, and torch can detect them: it has no such operators for numbers of eight
    bits."""
    if tensor.layout is not sys.modules["torch"].strided or tensor.device.type == "meta":
        return False
    return bool(tensor.is_complex() or (tensor.is_floating_point() and tensor.element_size() > 1))


def count_nonfinite(tensor: Any) -> Any:
    """How many values are NaN or infinite, and how many of them -inf, which masks hold in healthy trainings: on its
    device. Piece by piece, since masks of a whole activation would be half as large as it, at the peak of the step."""
    torch = sys.modules["torch"]
    bad, below = 0, torch.zeros((), dtype=torch.int64, device=tensor.device)
    for piece in _pieces(tensor):
        bad = (~torch.isfinite(piece)).sum() + bad
        below = below if tensor.is_complex() else (piece == -math.inf).sum() + below
    return torch.stack([bad, below])


def _pieces(tensor: Any) -> Iterator[Any]:
    """Views of at most _PIECE numbers each, however they lie in memory."""
    if tensor.numel() <= _PIECE:
        yield tensor
    else:
        for half in tensor.chunk(2, max(range(tensor.dim()), key=tensor.size)):
            yield from _pieces(half)


def _range_of(tensor: Any) -> Any:
    """Smallest and largest value, how many are NaN or infinite, how many -inf: on its device."""
    torch = sys.modules["torch"]
    low, high = torch.aminmax(tensor if tensor.dtype is not torch.bool else tensor.to(torch.uint8))
    bad = count_nonfinite(tensor) if can_be_counted(tensor) else torch.zeros(2, device=tensor.device)
    return torch.cat([torch.stack([low.double(), high.double()]), bad.double()])


class _One:
    """One tensor of a batch."""

    __slots__ = ("_head", "_range", "shown")

    def __init__(self, name: str, tensor: Any) -> None:
        torch = sys.modules["torch"]
        local = getattr(tensor, "_local_tensor", tensor).detach()
        self.shown: BatchTensor = {
            "name": name, "shape": [int(size) for size in tensor.shape], "dtype": str(tensor.dtype).removeprefix("torch."),
            "device": local.device.type,
        }  # fmt: skip
        self._range: Reading | None = None
        self._head: Any = None
        if not local.numel() or local.layout is not torch.strided or local.device.type == "meta":
            return
        head = local.reshape(-1)[: max(1, HEAD_BYTES // local.element_size())]
        with torch.no_grad():
            if not local.is_complex():
                # of unsigned integers, and floats of eight bits: no range then
                with contextlib.suppress(RuntimeError):  # NotImplementedError in newer versions of torch
                    self._range = collect(_range_of(local))
            if local.is_cpu:
                self.shown["hash"] = _hash(head)
            else:
                self._head = to_host(head)

    def ready(self) -> bool:
        return (self._range is None or self._range.ready()) and (self._head is None or reached(self._head[1]))

    def result(self) -> BatchTensor:
        if self._range is not None:
            low, high, bad, below = self._range.values()
            self.shown |= {"min": low, "max": high, "nonfinite": int(bad), "minus_infinite": int(below)}
            self._range = None
        if self._head is not None:
            self.shown["hash"] = _hash(self._head[0])
            self._head = None
        return self.shown


class Fingerprint:
    """The tensors of one batch. step: whose it was; where: how it was found."""

    def __init__(self, step: int, where: str, named: Iterator[tuple[str, Any]] | list[tuple[str, Any]]) -> None:
        self.step, self._where = step, where
        self._parts = [_One(name, tensor) for (name, tensor), _ in zip(named, range(MOST_TENSORS), strict=False)]

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


def _hash(tensor: Any) -> str:
    torch = sys.modules["torch"]
    raw = bytes(tensor.contiguous().view(torch.uint8).numpy().data)
    return hashlib.blake2b(raw, digest_size=8).hexdigest()


def in_callers(samples: int | None, frame: FrameType | None) -> tuple[str, list[tuple[str, Any]]]:
    """The batch among the local variables of whoever called backward: tensors without gradients whose first dimension
    is the batch's. Answers where it was found and the named tensors; ("", []) where nothing looks like it."""
    left = iter(range(_MOST_IN_ALL))
    for _ in range(_MOST_FRAMES):
        if frame is None:
            break
        if not frame.f_globals.get("__name__", "").startswith(("torch.", "perfagent.", "perfagent_loop.")):
            with variables_of(frame) as variables:
                found = _batch_among(variables, samples, left)
            if found:
                where = (
                    f"local variables of {frame.f_code.co_name} ({short(frame.f_code.co_filename)}:{frame.f_lineno})"
                )
                return where, found
        frame = frame.f_back
    return "", []


def _batch_among(
    variables: Iterable[tuple[str, Any]], samples: int | None, left: Iterator[int]
) -> list[tuple[str, Any]]:
    """The tensors that may be the batch's. Variables that hold more of them than a batch has come last: a list of all
    batches that the loop iterates over is not the batch of this step."""
    torch = sys.modules["torch"]
    batches: list[tuple[str, Any]] = []
    datasets: list[tuple[str, Any]] = []
    for name, value in variables:
        if issubclass(type(value), torch.nn.Module):
            continue
        tensors = _tensors_in(value, name, 0, islice(left, MOST_OBJECTS))
        alike = [*islice((named for named in tensors if _is_batch(named[1], samples)), MOST_TENSORS + 1)]
        (batches if len(alike) <= MOST_TENSORS else datasets).extend(alike)
    return [*batches, *datasets][:MOST_TENSORS]


def _is_batch(tensor: Any, samples: int | None) -> bool:
    return not tensor.requires_grad and bool(tensor.dim()) and (samples is None or tensor.shape[0] == samples)
