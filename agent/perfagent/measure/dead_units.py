"""Finds dead units: units of a ReLU that are zero for every sample of a batch and so pass no gradient on.

One training call of the root model is checked now and then. In a small batch a healthy unit is often zero everywhere
(every second one for a single sample). So a share is reported once LEAST_ROWS samples or positions were seen, in
several calls if needed, and dead units are those that were zero in all of them. The hooks on the activation modules are
added when that call begins and removed when it returns: outside of it nothing of ours is on a module, so copies,
pickles and torch.compile never meet a hook. Models that are compiled, scripted or replicated over devices are left
alone. A functional relu cannot be seen: such a model has no such series.

The module that made the tensor shows which dimension holds the units (activation_producers.py). If that is not known,
an activation with more than two dimensions is left out. A module that is called several times has the units of all its
calls (the single ReLU of a residual block), unless the same modules made the units again (a recurrent network): then
only the first of those calls is checked.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from perfagent.boundary.guard import guarded
from perfagent.device import Reading, collect, is_captured
from perfagent.measure.activation_producers import Producers
from perfagent.measure.compiled import compiled

if TYPE_CHECKING:
    from torch import Tensor, device, nn

__all__ = ["DeadShares", "DeadUnits", "activations_of"]

KINDS = frozenset(("ReLU", "ReLU6", "ReLUSquaredActivation"))
"""Activations that are zero when off, and never negative."""
MOST_MODULES = 64
Units = frozenset[int]
"""The units that some modules make, as the ids of these modules."""
_MOST_NUMBERS = 2**22
"""Most numbers of an output to check; further samples are left out."""
LEAST_ROWS = 64
"""Samples times positions for which a unit must be zero. Of a random network's units, 30 % look dead in 2
rows, none in 64."""
_MOST_CALLS = 8
"""Most calls of one module to check in a call of the model."""
_suspects: WeakKeyDictionary[nn.Module, dict[Units, tuple[Tensor, int]]] = WeakKeyDictionary()
"""module -> producers of its units -> which units were zero in every row so far (on the device), and the number of rows;
kept until there are enough rows."""


def activations_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Returns (name, module) of the activations to check; empty if hooks would meet a compiler."""
    torch = sys.modules["torch"]
    if compiled() or isinstance(model, torch.nn.DataParallel):
        return []
    found = []
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) or (
            module is not model and module._compiled_call_impl is not None
        ):
            return []
        if type(module).__name__ in KINDS and name:
            found.append((name, module))
    step = -(-len(found) // MOST_MODULES) or 1
    return found[::step]


class DeadUnits:
    """Checks the next training call of the root model, once. done: gets the shares, on the training thread. cost_ns:
    the time that the check took on that thread; 0 before it."""

    __slots__ = ("_activations", "_checked", "_dead", "_done", "_producers", "cost_ns")

    def __init__(self, model: nn.Module, done: Callable[[DeadShares], None]) -> None:
        self.cost_ns = 0
        self._activations = {module: name for name, module in activations_of(model)}
        self._done = done
        self._dead: dict[str, list[Tensor]] = {}
        self._checked: dict[str, set[Units]] = {}
        self._producers = Producers(model) if self._activations else None

    def __bool__(self) -> bool:
        return bool(self._activations)

    def call(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs the root model's call and checks its activations."""
        hook = sys.modules["torch"].nn.modules.module.register_module_forward_hook(self._called)
        try:
            return call(*args, **kwargs)
        finally:
            hook.remove()
            self._finish()

    @guarded
    def _called(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if self._producers is None:
            return
        began = perf_counter_ns()
        name = self._activations.get(module)
        if name is None:
            self._producers.note(module, output)
        elif isinstance(output, sys.modules["torch"].Tensor):
            self._activated(name, module, inputs[0] if inputs else None, output, self._producers)
        self.cost_ns += perf_counter_ns() - began

    def _activated(self, name: str, module: nn.Module, taken: Any, output: Tensor, producers: Producers) -> None:
        checked = self._checked.setdefault(name, set())
        if len(checked) >= _MOST_CALLS:
            return
        dimension, units = producers.origin(taken, output)
        if units in checked or (checked and not units):
            return
        checked.add(units)
        if output.dim() == 2:
            dimension = 1
        if dimension is not None and output.dim() >= 2 and output.numel() and not is_captured(output):
            self._check(name, module, units, output.detach(), dimension)

    def _check(self, name: str, module: nn.Module, units: Units, output: Tensor, dimension: int) -> None:
        output = output[: max(1, _MOST_NUMBERS * output.shape[0] // output.numel())]
        rows = output.numel() // output.shape[dimension]
        with sys.modules["torch"].no_grad():
            dead = output.amax([other for other in range(output.dim()) if other != dimension]) == 0  # NaN is not zero
            suspects = _suspects.setdefault(module, {})
            before, more = suspects.pop(units, (None, 0))
            if before is not None and before.shape == dead.shape and before.device == dead.device:
                dead, rows = dead & before, rows + more
            if rows < LEAST_ROWS:
                suspects[units] = dead, rows
            else:
                self._dead.setdefault(name, []).append(dead)

    @guarded
    def _finish(self) -> None:
        began = perf_counter_ns()
        torch = sys.modules["torch"]
        together: dict[device, dict[str, Tensor]] = {}
        for module, name in self._activations.items():
            dead = self._dead.get(name)
            if dead is None or self._checked[name] & _suspects[module].keys():
                continue  # report the units of all its calls or none
            with torch.no_grad():
                units = torch.cat([mask for mask in dead if mask.device == dead[0].device])
                together.setdefault(units.device, {})[name] = units.float().mean()
        found = [(collect(torch.stack([*shares.values()])), [*shares]) for shares in together.values()]
        readings = [(reading, names) for reading, names in found if reading is not None]
        if readings:
            self._done(DeadShares(readings))
        self._activations, self._dead, self._producers = {}, {}, None
        self.cost_ns += perf_counter_ns() - began


class DeadShares:
    """The share of dead units of each activation module, perhaps still on the device."""

    __slots__ = ("_readings",)

    def __init__(self, readings: list[tuple[Reading, list[str]]]) -> None:
        self._readings = readings

    def ready(self) -> bool:
        return all(reading.ready() for reading, _ in self._readings)

    def shares(self) -> dict[str, float]:
        """Returns module -> share, 0 to 1. Called once, when ready."""
        return {
            name: share
            for reading, names in self._readings
            for name, share in zip(names, reading.values(), strict=True)
        }
