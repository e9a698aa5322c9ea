"""Adds up the memory of a training by parameter group: parameters, gradients, optimizer state, and on a GPU the rest.

This runs once a minute on the sender's thread and uses only the sizes of tensors: it touches no storage, asks no
device, waits for nothing, and keeps no reference. 306 parameters with AdamW's state take 3 ms of CPU a minute; the GIL
is released every 64 tensors. Gradients count with the size of their parameters and are never touched: while backward
runs without the GIL, `parameter.grad` from another thread takes a reference to a tensor that autograd is replacing, and
the process dies of a corrupted heap. Gradients of an embedding with `sparse=True` are as large as the rows that a batch
used, which is not known here: they do not count. Of sharded tensors this rank's part counts; of quantized ones the
tensors they consist of. Tensors offloaded to the host count separately, and those that do not exist yet (on `meta`,
lazy) not at all.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from perfagent.signals.memory import allocator
from perfagent.signals.sharding import local
from perfagent.signals.tensor_storage import is_lazy, made_of, numbers_in, tensors_in

if TYPE_CHECKING:
    from perfagent.delivery.handoff import Handoff, Source
    from perfagent.step.state import StepState

__all__ = ["MemoryTable", "table"]

EVERY_S = 60.0
FROM_STEP = 2
"""Optimizer state exists from the first step on; from the second step on, a loop has reached its peak."""
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
    """`poll()` on the sender's thread emits rows `memory/*`, and an event `memory` with the groups when
    something changed.

    model: returns the root module or None; device: returns the index of the device or None.
    """

    def __init__(
        self,
        sender: Handoff,
        progress: StepState,
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
        optimizer = p.selection.primary
        if now < self._next or p.completed < FROM_STEP or optimizer is None:
            return
        self._next = now + EVERY_S
        if self._source is not None:
            self._source.due = self._next
        _, *others = p.selection.all()
        found = table(optimizer, self._model(), others)
        sums = {column: int(found[column]) for column in _COLUMNS}
        peak = self._peak(found["devices"]) if self._device() is not None else None
        known = sum(sums[column] for column in _COLUMNS[:3])
        if peak is not None and peak >= known:  # else the script reset the peak, and frees gradients early
            sums["activations_and_other"] = int(peak) - known
        if not sums["offloaded"]:
            del sums["offloaded"]
        names = tuple(_SERIES[column] for column in sums)
        self._sender.rows.append((p.in_progress(), time.time(), now, names, tuple(map(float, sums.values()))))
        if any(abs(size - self._told.get(column, -1)) > _CHANGED * size for column, size in sums.items()):
            self._told = sums
            self._sender.event("memory", {**sums, "groups": found["groups"]}, step=p.in_progress())

    @staticmethod
    def _peak(devices: Iterable[int]) -> float | None:
        """Returns the peak of all devices that hold parameters of this process; None if there is none, or
        one is not known."""
        peaks = [allocator(device).get("cuda/peak_allocated_bytes") for device in devices]
        told = [peak for peak in peaks if peak is not None]
        return sum(told) if told and len(told) == len(peaks) else None


def table(optimizer: Any, model: Any = None, others: Sequence[Any] = ()) -> dict[str, Any]:
    """Returns the bytes of `parameters`, `gradients`, `optimizer_state` and `offloaded`, the `devices` in
    use, and `groups`.

    offloaded: all three kinds, where they are on the host while other parameters are on a device.
    groups: the same bytes for each parameter group, with its name or index, its learning rate and `numbers` (how many
        numbers it trains here).

    Parameters of `model` that no group holds are frozen: they count as parameters only. others: more optimizers,
    whose groups follow.
    """
    of_model = list(model.parameters()) if model is not None else []
    trained = [group["params"] for one in (optimizer, *others) for group in list(one.param_groups)]
    counter = _Counter(chain(*trained, of_model))
    counter.leave_out("gradients", _of_sparse_embeddings(model))
    groups = [row for one in (optimizer, *others) for row in _groups(one, counter)]
    whole: dict[str, Any] = {column: sum(row[column] for row in groups) for column in _COLUMNS}
    for parameter in of_model:
        counter.add(whole, "parameters", parameter)
    return {**whole, "devices": sorted(counter.devices), "groups": groups}


def _of_sparse_embeddings(model: Any) -> Iterator[Any]:
    nn = sys.modules["torch"].nn
    for module in list(model.modules()) if model is not None else ():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            yield module.weight


def _groups(optimizer: Any, counter: _Counter) -> list[dict[str, Any]]:
    state = getattr(optimizer, "state", {})
    together = not state or isinstance(optimizer, sys.modules["torch"].optim.LBFGS)  # keeps all state at one parameter
    groups = []
    for index, group in enumerate(list(optimizer.param_groups)):
        row: dict[str, Any] = {"name": str(group.get("name", index)), "numbers": 0, **dict.fromkeys(_COLUMNS, 0)}
        lr = _on_host(group.get("lr"))
        if lr is not None:
            row["lr"] = lr
        for parameter in list(group["params"]):
            counter.add(row, "parameters", parameter)
            row["numbers"] += numbers_in(parameter) if parameter.requires_grad else 0
            entry = state.get(parameter)
            if (entry or together) and parameter.requires_grad:  # it is stepped, so it has a gradient after backward
                counter.add(row, "gradients", parameter)
            for tensor in tensors_in(entry):
                counter.add(row, "optimizer_state", tensor)
        groups.append(row)
    return groups


def _on_host(number: Any) -> float | None:
    """Returns a learning rate as a number; None if it is on a device, since nothing here waits for one."""
    if isinstance(number, sys.modules["torch"].Tensor):
        return float(number) if number.is_cpu and number.numel() == 1 else None
    return float(number) if isinstance(number, (int, float)) else None


class _Counter:
    """Adds up sizes, each tensor and each gradient once. parameters: all of them; the first that is not on the host
    shows the kind of device that trains. devices: the CUDA devices that hold something."""

    def __init__(self, parameters: Iterable[Any]) -> None:
        self.devices: set[int] = set()
        self._seen: set[int] = set()
        """ids of the tensors that were added; for a gradient, the complement of its parameter's id."""
        torch = sys.modules["torch"]
        self._tensor = torch.Tensor
        self._plain = {torch.Tensor, torch.nn.Parameter}
        kinds = (parameter.device.type for parameter in parameters)
        self._kind = next((kind for kind in kinds if kind not in ("cpu", "meta")), "cpu")

    def leave_out(self, column: str, tensors: Iterable[Any]) -> None:
        self._seen.update(~id(tensor) if column == "gradients" else id(tensor) for tensor in tensors)

    def add(self, row: dict[str, Any], column: str, tensor: Any) -> None:
        """Adds a tensor's size. A gradient is as large as its parameter, which is passed in its place."""
        plain = type(tensor) in self._plain
        if not plain and (not isinstance(tensor, self._tensor) or is_lazy(tensor)):
            return
        gradient = column == "gradients"
        key = ~id(tensor) if gradient else id(tensor)
        if key in self._seen:
            return
        self._seen.add(key)
        if len(self._seen) % _AT_ONCE == 0:
            time.sleep(0)  # lets the training thread have the GIL
        if plain and self._kind == "cpu" and tensor.is_cpu:  # the usual case, in a third of the time
            row[column] += tensor.numel() * tensor.element_size()
            return
        for part in (tensor,) if plain else (local(tensor),) if gradient else made_of(tensor):
            device, size = part.device, part.numel() * part.element_size()
            if device.type == "meta":
                continue
            if device.type != "cpu":
                self.devices.add(device.index)
            row[column if device.type == self._kind or part.dim() == 0 else "offloaded"] += size
