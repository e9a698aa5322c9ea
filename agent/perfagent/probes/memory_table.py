"""Adds up the memory of a training by parameter group: parameters, gradients, optimizer state, and on a GPU the rest.

This runs once a minute on the sender's thread and uses only the sizes of tensors: it touches no storage, asks no device,
waits for nothing, and keeps no reference. 306 parameters with AdamW's state take 3 ms of CPU; the GIL is released every 64
tensors. Gradients count with the size of their parameters and are never touched: `parameter.grad` from another thread takes
a reference to a tensor that autograd is replacing, and the process dies of a corrupted heap. Of sharded tensors this rank's
part counts; of quantized ones the tensors they consist of; those that do not exist yet (on `meta`, lazy) not at all.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from perfagent.device.memory import allocator
from perfagent.measure.sharding import local
from perfagent.measure.tensor_storage import is_lazy, made_of, numbers_in, tensors_in

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from perfagent.delivery.handoff import Handoff
    from perfagent.step.state import StepState

__all__ = ["MemoryTable", "table"]

EVERY_S = 60.0
FROM_STEP = 2
"""Optimizer state exists from the first step on; from the second step on, a loop has reached its peak."""
_AT_ONCE = 64
_CHANGED = 0.01
_COLUMNS = ("parameters", "gradients", "optimizer_state", "offloaded")


class MemoryTable:
    """`poll()` on the sender's thread emits rows `memory/*`, and an event `memory` with the groups when
    something changed. model: returns the root module or None."""

    def __init__(
        self,
        handoff: Handoff,
        progress: StepState,
        model: Callable[[], nn.Module | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._handoff, self._progress, self._model, self._clock = handoff, progress, model, clock
        self._next = 0.0
        self._told: dict[str, int] = {}

    def install(self) -> None:
        self._handoff.add_source(self.poll, every_s=1.0)

    def poll(self) -> None:
        p, now = self._progress, self._clock()
        if now < self._next or p.completed < FROM_STEP:
            return
        optimizers = p.selection.all()
        if not optimizers:
            return
        self._next = now + EVERY_S
        found = table(optimizers, self._model())
        sums = {column: int(found[column]) for column in _COLUMNS}
        peaks = [allocator(device).get("cuda/peak_allocated_bytes") for device in found["devices"]]
        peak = sum(peak or 0.0 for peak in peaks)
        known = sum(sums[column] for column in _COLUMNS[:3])
        if peaks and None not in peaks and peak >= known:  # else the script reset the peak, and frees gradients early
            sums["activations_and_other"] = int(peak) - known
        if not sums["offloaded"]:
            del sums["offloaded"]
        names = tuple(f"memory/{column}_bytes" for column in sums)
        self._handoff.rows.append((p.in_progress(), time.time(), now, names, tuple(map(float, sums.values()))))
        if any(abs(size - self._told.get(column, -1)) > _CHANGED * size for column, size in sums.items()):
            self._told = sums
            self._handoff.event("memory", {**sums, "groups": found["groups"]}, step=p.in_progress())


def table(optimizers: Sequence[Optimizer], model: nn.Module | None = None) -> dict[str, Any]:
    """Returns the bytes of `parameters`, `gradients`, `optimizer_state` and `offloaded`, the `devices` in
    use, and `groups`.

    offloaded: all three kinds, where they are on the host while other parameters are on a device.
    groups: the same bytes for each parameter group, with its name or index, its learning rate and `numbers` (how many
        numbers it trains here).

    Parameters of `model` that no group holds are frozen: they count as parameters only.
    """
    of_model = list(model.parameters()) if model is not None else []
    trained = [one for optimizer in optimizers for group in list(optimizer.param_groups) for one in group["params"]]
    counter = _Counter([*trained, *of_model])
    groups = [
        _group(optimizer, index, counter) for optimizer in optimizers for index in range(len(optimizer.param_groups))
    ]
    whole: dict[str, Any] = {column: sum(row[column] for row in groups) for column in _COLUMNS}
    for parameter in of_model:
        counter.add(whole, "parameters", parameter)
    return {**whole, "devices": sorted(counter.devices), "groups": groups}


def _group(optimizer: Optimizer, index: int, counter: _Counter) -> dict[str, Any]:
    state, group = getattr(optimizer, "state", {}), optimizer.param_groups[index]
    row: dict[str, Any] = {"name": str(group.get("name", index)), "numbers": 0, **dict.fromkeys(_COLUMNS, 0)}
    lr = group.get("lr")
    if isinstance(lr, (int, float)) or (isinstance(lr, sys.modules["torch"].Tensor) and lr.is_cpu and lr.numel() == 1):
        row["lr"] = float(lr)  # waits for no device
    for parameter in list(group["params"]):
        counter.add(row, "parameters", parameter)
        if parameter.requires_grad:
            row["numbers"] += numbers_in(parameter)
            counter.add(row, "gradients", parameter)
        for tensor in tensors_in(state.get(parameter)):
            counter.add(row, "optimizer_state", tensor)
    return row


class _Counter:
    """Adds up sizes, each tensor and each gradient once. parameters: all of them; the first that is not on the host
    shows the kind of device that trains. devices: the accelerators that hold something."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.devices: set[int] = set()
        self._seen: set[tuple[bool, int]] = set()
        self._tensor = sys.modules["torch"].Tensor
        kinds = (parameter.device.type for parameter in parameters)
        self._kind = next((kind for kind in kinds if kind not in ("cpu", "meta")), "cpu")

    def add(self, row: dict[str, Any], column: str, tensor: Any) -> None:
        """Adds a tensor's size. A gradient is as large as its parameter, which is passed in its place."""
        gradient = column == "gradients"
        if not isinstance(tensor, self._tensor) or is_lazy(tensor) or (gradient, id(tensor)) in self._seen:
            return
        self._seen.add((gradient, id(tensor)))
        if len(self._seen) % _AT_ONCE == 0:
            time.sleep(0)  # lets the training thread have the GIL
        for part in (local(tensor),) if gradient else made_of(tensor):
            device, size = part.device, part.numel() * part.element_size()
            if device.type == "meta":
                continue
            if device.type != "cpu":
                self.devices.add(device.index)
            row[column if device.type == self._kind or part.dim() == 0 else "offloaded"] += size
