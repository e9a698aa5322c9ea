"""Dead units: those of a ReLU that are zero for every sample of a batch, and so pass no gradient on.

Looked at in one training call of the root model now and then. In a small batch a healthy unit is often zero everywhere (each
second one where there is one sample): a share is told once LEAST_ROWS samples or positions were seen, in several calls if need
be, and the dead units are those that were zero in all of them. The hooks on the activation modules go on when that call begins
and are off when it returns: outside of it nothing of ours is on a module, so that copies, pickles and torch.compile never meet
it. Models that are compiled, scripted or replicated over devices are left alone. A functional relu cannot be seen: such a model
has no such series.

Which dimension the units are in is said by the module that made the tensor (units.py). Where that is not known, an activation of
more than two dimensions is left out. A module that is called several times has the units of all its calls (the one ReLU of a
residual block), but where the same modules made them once more (a recurrent network): then the first of those calls is looked at.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from time import perf_counter_ns
from typing import Any
from weakref import WeakKeyDictionary

from perfagent.boundary.dynamo import not_traced
from perfagent.boundary.guard import failed
from perfagent.device import Reading, collect, is_captured
from perfagent.signals.activation_producers import Makers, makers_of
from perfagent.signals.compiled import compiled

__all__ = ["DeadShares", "DeadUnits", "activations_of"]

KINDS = frozenset(("ReLU", "ReLU6", "ReLUSquaredActivation"))
"""Activations that are zero where they are off, and never negative."""
MOST_MODULES = 64
Units = frozenset[int]
"""Those that some modules make, by the ids of these."""
_MOST_NUMBERS = 2**22
"""Numbers of an output that are looked at: samples beyond that are left out."""
LEAST_ROWS = 64
"""Samples times positions that a unit must have been zero for. A random network's units: 30 % look dead in 2 rows, none in 64."""
_MOST_CALLS = 8
"""Of one module in a call of the model, those that are looked at."""
_suspects: WeakKeyDictionary[Any, dict[Units, tuple[Any, int]]] = WeakKeyDictionary()
"""By module, and by what made the units: which were zero in every row so far (on the device), and how many rows those were; until
they are enough."""


def activations_of(model: Any) -> list[tuple[str, Any]]:
    """(name, module) of the activations that can be looked at; none where hooks would meet a compiler."""
    torch = sys.modules["torch"]
    if compiled() or isinstance(model, torch.nn.DataParallel):
        return []
    found = []
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) or (module is not model and module._compiled_call_impl is not None):
            return []
        if type(module).__name__ in KINDS and name:
            found.append((name, module))
    step = -(-len(found) // MOST_MODULES) or 1
    return found[::step]


class DeadUnits:
    """Looks at the next training call of the root model, once. done: gets the figures, on the training thread. cost_ns: what the
    look has taken of that thread; 0 before it."""

    __slots__ = ("_activations", "_dead", "_done", "_looked_at", "_made", "_makers", "cost_ns")

    def __init__(self, model: Any, done: Callable[[DeadShares], None]) -> None:
        self.cost_ns = 0
        self._activations = activations_of(model)
        self._done = done
        self._dead: dict[str, list[Any]] = {}
        self._looked_at: dict[str, set[Units]] = {}
        self._makers = makers_of(model) if self._activations else []
        self._made = Makers()

    def __bool__(self) -> bool:
        return bool(self._activations)

    def call(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The root model's call, looked at."""
        began = perf_counter_ns()
        handles: list[Any] = []
        try:
            for name, module in self._activations:
                handles.append(module.register_forward_hook(_Hook(self, partial(self._activated, name))))
            for module, last in self._makers:
                handles.append(module.register_forward_hook(_Hook(self, partial(self._made.note, last))))
        except Exception as error:  # noqa: BLE001 - it must not reach the training loop
            failed(_NAME, error)
        self.cost_ns += perf_counter_ns() - began
        try:
            return call(*args, **kwargs)
        finally:
            began = perf_counter_ns()
            for handle in handles:
                handle.remove()
            self._finish(began)

    def _activated(self, name: str, module: Any, inputs: Any, output: Any) -> None:
        looked_at = self._looked_at.setdefault(name, set())
        if len(looked_at) >= _MOST_CALLS or not isinstance(output, sys.modules["torch"].Tensor):
            return
        dimension, units = self._made.origin(inputs[0] if inputs else None, output)
        if units in looked_at or (looked_at and not units):
            return
        looked_at.add(units)
        if output.dim() == 2:
            dimension = 1
        if dimension is not None:
            self._look(name, module, units, output, dimension)

    def _look(self, name: str, module: Any, units: Units, output: Any, dimension: int) -> None:
        output = output.detach()
        if output.dim() < 2 or not output.numel() or is_captured(output):
            return
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

    def _finish(self, began: int) -> None:
        try:
            torch = sys.modules["torch"]
            together: dict[Any, dict[str, Any]] = {}
            for name, module in self._activations:
                dead = self._dead.get(name)
                if dead is None or self._looked_at[name] & _suspects[module].keys():
                    continue  # the units of all its calls, or none
                device = dead[0].device
                with torch.no_grad():
                    units = torch.cat([mask for mask in dead if mask.device == device])
                    together.setdefault(device, {})[name] = units.float().mean()
            found = [(collect(torch.stack([*shares.values()])), [*shares]) for shares in together.values()]
            readings = [(reading, names) for reading, names in found if reading is not None]
            if readings:
                self._done(DeadShares(readings))
        except Exception as error:  # noqa: BLE001 - it must not reach the training loop
            failed(_NAME, error)
        self._activations, self._dead, self._makers, self._made = [], {}, [], Makers()
        self.cost_ns += perf_counter_ns() - began


_NAME = f"{__name__}.DeadUnits"


class _Hook:
    """On a module for one call. Where the model copies or pickles itself in the midst of it, what takes its place does nothing,
    and is of the standard library, so that the copy can be read where perfagent is not."""

    __slots__ = ("_look", "_of")

    def __init__(self, of: DeadUnits, look: Callable[[Any, Any, Any], None]) -> None:
        self._of, self._look = of, look

    def __call__(self, module: Any, inputs: Any, output: Any) -> None:
        began = perf_counter_ns()
        try:
            self._look(module, inputs, output)
        except Exception as error:  # noqa: BLE001 - it must not reach the training loop
            failed(_NAME, error)
        self._of.cost_ns += perf_counter_ns() - began

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")


not_traced(_Hook.__call__, nor_what_it_calls=True)


class DeadShares:
    """Share of dead units of each activation module, perhaps still on the device."""

    __slots__ = ("_readings",)

    def __init__(self, readings: list[tuple[Reading, list[str]]]) -> None:
        self._readings = readings

    def ready(self) -> bool:
        return all(reading.ready() for reading, _ in self._readings)

    def shares(self) -> dict[str, float]:
        """Module -> share, 0 to 1; once, when ready."""
        return {name: share for reading, names in self._readings for name, share in zip(names, reading.values(), strict=True)}
