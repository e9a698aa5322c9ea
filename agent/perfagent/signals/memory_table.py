"""What the memory of a training holds: parameters, gradients, optimizer state, and on a GPU the rest, by parameter group too.

Worked out once a minute on the sender's thread from the sizes that tensors tell of themselves: no storage is touched, nothing on
a device is asked for or waited for, and no reference outlives the look. 306 parameters with AdamW's state take 4 ms of CPU
a minute; the GIL is let go of every 64 tensors. Gradients count with the size of their parameters and are never touched: while
backward runs without the GIL, `parameter.grad` from another thread takes a reference to what autograd is replacing, and the
process dies of a corrupted heap. Of sharded tensors the part of this rank counts; what is offloaded to the host counts apart.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from perfagent.signals.memory import allocator

if TYPE_CHECKING:
    from perfagent.delivery.sender import Sender, Source
    from perfagent.hooks.progress import Progress

__all__ = ["MemoryTable", "table"]

EVERY_S = 60.0
FROM_STEP = 2
"""State exists from the first step on; from the second on a loop has seen its peak."""
_AT_ONCE = 64
_CHANGED = 0.01
_COLUMNS = ("parameters", "gradients", "optimizer_state", "offloaded")
_SERIES = {
    "parameters": "memory/parameters_bytes",
    "gradients": "memory/gradients_bytes",
    "optimizer_state": "memory/optimizer_state_bytes",
    "offloaded": "memory/offloaded_bytes",
    "activations_and_other": "memory/activations_and_other_bytes",
}


class MemoryTable:
    """`poll()` on the sender's thread emits rows `memory/*`, and an event `memory` with the groups when something changed.

    model: gives the root module or None; device: ordinal of the CUDA device or None.
    """

    def __init__(
        self,
        sender: Sender,
        progress: Progress,
        model: Callable[[], Any],
        device: Callable[[], int | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sender, self._progress, self._model, self._device, self._clock = sender, progress, model, device, clock
        self._next = 0.0
        self._source: Source | None = None
        self._told: dict[str, int] = {}

    def install(self) -> None:
        self._source = self._sender.add_source(self.poll, every_s=1.0)

    def poll(self) -> None:
        p = self._progress
        now = self._clock()
        if now < self._next or p.completed < FROM_STEP or p.primary is None:
            return
        self._next = now + EVERY_S
        if self._source is not None:
            self._source.due = self._next
        optimizer = p.primary()
        if optimizer is None:
            return
        others = [other for one in list(p.beside.values()) if (other := one()) is not None and other is not optimizer]
        found = table(optimizer, self._model(), others)
        sums = {column: int(found[column]) for column in _COLUMNS}
        device = self._device()
        peak = allocator(device).get("cuda/peak_allocated_bytes") if device is not None else None
        if peak is not None:
            sums["activations_and_other"] = max(0, int(peak) - sum(sums[column] for column in _COLUMNS[:3]))
        if not sums["offloaded"]:
            del sums["offloaded"]
        names = tuple(_SERIES[column] for column in sums)
        self._sender.rows.append((p.in_progress(), time.time(), now, names, tuple(map(float, sums.values()))))
        if any(abs(size - self._told.get(column, -1)) > _CHANGED * size for column, size in sums.items()):
            self._told = sums
            self._sender.event("memory", {**sums, "groups": found["groups"]}, step=p.in_progress())


def table(optimizer: Any, model: Any = None, others: Sequence[Any] = ()) -> dict[str, Any]:
    """Bytes of `parameters`, `gradients`, `optimizer_state` and `offloaded` (of all three, on another kind of device than the
    parameters), and `groups`: the same of each parameter group, with its name or index, its learning rate and its `numbers`
    (how many numbers it trains here). Parameters of `model` that no group holds are frozen: they count as parameters only.
    others: more optimizers, whose groups follow."""
    counter = _Counter()
    groups = [row for one in (optimizer, *others) for row in _groups(one, counter)]
    whole: dict[str, Any] = {column: sum(row[column] for row in groups) for column in _COLUMNS}
    for parameter in list(model.parameters()) if model is not None else ():
        counter.add(whole, "parameters", parameter)
    return {**whole, "groups": groups}


def _groups(optimizer: Any, counter: _Counter) -> list[dict[str, Any]]:
    state = getattr(optimizer, "state", {})
    together = not state or isinstance(optimizer, sys.modules["torch"].optim.LBFGS)  # which keeps all with its first parameter
    groups = []
    for index, group in enumerate(list(optimizer.param_groups)):
        row: dict[str, Any] = {"name": str(group.get("name", index)), "numbers": 0, **dict.fromkeys(_COLUMNS, 0)}
        lr = group.get("lr")
        if isinstance(lr, float):
            row["lr"] = lr
        for parameter in list(group["params"]):
            counter.add(row, "parameters", parameter)
            row["numbers"] += _local(parameter).numel()
            entry = state.get(parameter)
            if (entry or together) and parameter.requires_grad:  # it is stepped, so that it has a gradient after backward
                counter.add(row, "gradients", parameter)
            for value in list(entry.values()) if isinstance(entry, dict) else ():
                for tensor in list(value) if isinstance(value, (list, tuple)) else (value,):
                    counter.add(row, "optimizer_state", tensor)
        groups.append(row)
    return groups


class _Counter:
    """Adds up sizes, each tensor and each gradient once, on the kind of device that the first parameter is on."""

    def __init__(self) -> None:
        self._seen: set[tuple[bool, int]] = set()
        self._kind = ""
        self._tensor: Any = sys.modules["torch"].Tensor

    def add(self, row: dict[str, Any], column: str, tensor: Any) -> None:
        """A gradient is as large as its parameter, which stands for it here."""
        key = column == "gradients", id(tensor)
        if not isinstance(tensor, self._tensor) or key in self._seen:
            return
        self._seen.add(key)
        if len(self._seen) % _AT_ONCE == 0:
            time.sleep(0)  # lets the training thread have the GIL
        part = _local(tensor)
        kind = part.device.type
        self._kind = self._kind or kind
        size = part.numel() * part.element_size()
        row[column if kind == self._kind or part.dim() == 0 else "offloaded"] += size


def _local(tensor: Any) -> Any:
    """This rank's part of a sharded tensor."""
    return getattr(tensor, "_local_tensor", tensor)
