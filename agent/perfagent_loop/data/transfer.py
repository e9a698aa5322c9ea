"""A batch's way from the host to a device, on a CUDA stream of its own.

A copy on the stream that computes waits for all that was queued there before. On a stream of its own it runs beside it;
the computing stream then waits for the copy alone, and the allocator learns that the tensors are in use there
(record_stream): else their memory could go to the next copy too early. Only copies from pinned memory overlap."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from perfagent_loop.kinds import Batch

__all__ = ["CopyStream", "moved", "rebuilt", "tensors_in"]


def moved(batch: Batch, device: torch.device) -> Any:
    """The batch with its tensors on the device; copies from pinned memory do not wait. On the CPU: the batch itself.

    Tensors are looked for in mappings, sequences, named tuples, dataclasses, and in what has a `to()` of its own."""
    if device.type == "cpu":
        return batch
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if hasattr(batch, "to"):
        return _moved_by_itself(batch, device)
    return rebuilt(batch, lambda part: moved(part, device))


class CopyStream:
    """Copies batches to one CUDA device beside what it computes.

    `send` begins a copy and returns at once; `receive` makes the current stream wait for it (the host does not) and
    gives the batch. One with tensors that are hidden, sparse or nested is copied on the current stream."""

    def __init__(self, device: torch.device) -> None:
        # With its number, as tensors have it: receive() compares.
        self.device = torch.device("cuda", torch.cuda.current_device()) if device.index is None else device
        self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def send(self, batch: Batch) -> tuple[Any, torch.cuda.Event]:
        """The batch on its way, and the event behind its copies."""
        with torch.cuda.stream(self._stream):
            sent = _Later(batch) if _goes_later(batch) else moved(batch, self.device)
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record(self._stream)
        return sent, arrived

    def receive(self, sent: tuple[Any, torch.cuda.Event]) -> Any:
        """The batch, for work on the stream that is current now."""
        batch, arrived = sent
        if isinstance(batch, _Later):
            return moved(batch.batch, self.device)
        current = torch.cuda.current_stream(self.device)
        current.wait_event(arrived)
        for tensor in tensors_in(batch):
            if tensor.device == self.device:
                tensor.record_stream(current)
        return batch


@dataclasses.dataclass(frozen=True, slots=True)
class _Later:
    """A batch that is copied on the stream that uses it."""

    batch: Batch


def _goes_later(batch: Batch) -> bool:
    """Whether it holds tensors that are sparse or nested, or that cannot be found from outside."""
    return any(
        hasattr(part, "to")
        if not isinstance(part, torch.Tensor)
        else part.layout is not torch.strided or part.is_nested
        for part in _leaves(batch)
    )


def _moved_by_itself(batch: Batch, device: torch.device) -> Any:
    try:
        return batch.to(device, non_blocking=True)
    except TypeError:  # a to() that knows only the device
        return batch.to(device)


def rebuilt(batch: Batch, change: Callable[[Any], Any]) -> Any:
    """The same container with each part changed; what is no container comes back as it is."""
    if isinstance(batch, (str, bytes, bytearray, range)):
        return batch
    if isinstance(batch, Mapping):
        parts = {name: change(value) for name, value in batch.items()}
        if type(batch) is dict:
            return parts
        same: Any = copy.copy(batch)
        if hasattr(same, "update"):
            same.update(parts)
            return same
        return parts
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(change(value) for value in batch))
    if isinstance(batch, Sequence):
        return type(batch)(change(value) for value in batch)  # type: ignore[call-arg]
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        same = copy.copy(batch)  # without its __init__, which may want other arguments
        for field in dataclasses.fields(batch):
            object.__setattr__(same, field.name, change(getattr(batch, field.name)))
        return same
    return batch


def _leaves(batch: Batch) -> Iterator[Any]:
    if isinstance(batch, (str, bytes, bytearray, range, torch.Tensor)):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _leaves(value)
    elif isinstance(batch, Sequence):
        for value in batch:
            yield from _leaves(value)
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        for field in dataclasses.fields(batch):
            yield from _leaves(getattr(batch, field.name))
    else:
        yield batch


def tensors_in(batch: Batch) -> Iterator[torch.Tensor]:
    """Every tensor of a batch, in mappings, sequences and dataclasses."""
    return (part for part in _leaves(batch) if isinstance(part, torch.Tensor))
