"""What a batch looked like: names, shapes, types, range, and a fingerprint by which the same batch is known again.

A tensor on the CPU is read at once; of one on a device the head is copied behind the work that is queued, and read later. Nothing
of a batch's content leaves the process but its smallest and largest value and a hash.
"""

from __future__ import annotations

import dataclasses
import hashlib
import sys
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

from perfagent.device import Reading, collect
from perfagent.frames import variables_of

__all__ = ["Fingerprint", "in_callers", "tensors_in"]

MOST_TENSORS = 16
HEAD_BYTES = 2**20
"""So much of each tensor is hashed."""
_MOST_FRAMES = 12


def tensors_in(value: Any, name: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """(name, tensor) of the tensors in nested tuples, lists, dicts and dataclasses, in order."""
    if depth > 4:
        return
    if isinstance(value, sys.modules["torch"].Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in list(value.items()):
            yield from tensors_in(item, f"{name}.{key}" if name else str(key), depth + 1)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from tensors_in(item, f"{name}[{index}]" if name else str(index), depth + 1)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name, None), f"{name}.{field.name}" if name else field.name, depth + 1)


class _One:
    """One tensor of a batch."""

    __slots__ = ("_head", "_range", "shown")

    def __init__(self, name: str, tensor: Any) -> None:
        torch = sys.modules["torch"]
        local = getattr(tensor, "_local_tensor", tensor).detach()
        self.shown: dict[str, Any] = {
            "name": name, "shape": [int(size) for size in tensor.shape], "dtype": str(tensor.dtype).removeprefix("torch."),
            "device": local.device.type,
        }  # fmt: skip
        self._range: Reading | None = None
        self._head: Any = None
        if not local.numel() or local.layout is not torch.strided or local.device.type == "meta":
            return
        head = local.reshape(-1)[: max(1, HEAD_BYTES // local.element_size())]
        real = not local.is_complex()
        with torch.no_grad():
            if real:
                low, high = torch.aminmax(local if local.dtype is not torch.bool else local.to(torch.uint8))
                bad = (~torch.isfinite(local)).sum() if local.is_floating_point() else torch.zeros_like(low)
                self._range = collect(torch.stack([low.double(), high.double(), bad.double()]))
            if local.is_cpu:
                self.shown["hash"] = _hash(head)
            elif local.is_cuda and not torch.cuda.is_current_stream_capturing():
                buffer = torch.empty(head.shape, dtype=head.dtype, pin_memory=True)
                buffer.copy_(head, non_blocking=True)
                event = torch.cuda.Event()
                event.record(torch.cuda.current_stream(local.device))
                self._head = (buffer, event)

    def ready(self) -> bool:
        return (self._range is None or self._range.ready()) and (self._head is None or bool(self._head[1].query()))

    def result(self) -> dict[str, Any]:
        if self._range is not None:
            low, high, bad = self._range.values()
            self.shown |= {"min": low, "max": high, "nonfinite": int(bad)}
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

    def result(self) -> dict[str, Any]:
        """{"step", "from", "hash", "tensors": [{"name", "shape", "dtype", "min", "max", "nonfinite", "hash"}]}, once ready."""
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
    """The batch among the local variables of whoever called backward: tensors without gradients whose first dimension is the
    batch's. Answers where it was found and the named tensors; ("", []) where nothing looks like it."""
    torch = sys.modules["torch"]
    for _ in range(_MOST_FRAMES):
        if frame is None:
            break
        if not frame.f_globals.get("__name__", "").startswith(("torch.", "perfagent.")):
            with variables_of(frame) as variables:
                found = [
                    (name, tensor)
                    for variable, value in variables
                    if not isinstance(value, torch.nn.Module)
                    for name, tensor in tensors_in(value, variable)
                    if not tensor.requires_grad and tensor.dim() and (samples is None or tensor.shape[0] == samples)
                ]
            if found:
                where = f"local variables of {frame.f_code.co_name} ({frame.f_code.co_filename}:{frame.f_lineno})"
                return where, found[:MOST_TENSORS]
        frame = frame.f_back
    return "", []
