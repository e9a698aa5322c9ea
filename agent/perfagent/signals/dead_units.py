"""Dead units: those of a ReLU that are zero for every sample of a batch, and so pass no gradient on.

Looked at in one training call of the root model now and then. In a small batch a healthy unit is often zero everywhere (each
second one where there is one sample): a share is told once LEAST_ROWS samples or positions were seen, in several calls if need
be, and the dead units are those that were zero in all of them. The hooks on the activation modules go on when that call begins
and are off when it returns: outside of it nothing of ours is on a module, so that copies, pickles and torch.compile never meet
it. Models that are compiled, scripted or replicated over devices are left alone. A functional relu cannot be seen: such a model
has no such series.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from perfagent.device import Reading, collect
from perfagent.hooks.guard import failed, not_traced

__all__ = ["DeadShares", "DeadUnits", "activations_of"]

KINDS = frozenset(("ReLU", "ReLU6", "ReLUSquaredActivation"))
"""Activations that are zero where they are off, and never negative."""
MOST_MODULES = 64
_MOST_NUMBERS = 2**22
"""Numbers of an output that are looked at: samples beyond that are left out."""
LEAST_ROWS = 64
"""Samples times positions that a unit must have been zero for. A random network's units: 30 % look dead in 2 rows, none in 64."""
_suspects: WeakKeyDictionary[Any, tuple[Any, int]] = WeakKeyDictionary()
"""By module: which units were zero in every row so far (on the device), and how many rows those were; until they are enough."""


def activations_of(model: Any) -> list[tuple[str, Any]]:
    """(name, module) of the activations that can be looked at; none where hooks would meet a compiler."""
    torch = sys.modules["torch"]
    used = getattr(sys.modules.get("torch._dynamo.eval_frame"), "cached_backends", {})
    if any(backend is not None for backend in used.values()):  # something was compiled; None is what disabling it leaves
        return []
    if isinstance(model, torch.nn.DataParallel):
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
    """Looks at the next training call of the root model, once. done: gets the figures, on the training thread."""

    __slots__ = ("_activations", "_convolved", "_dead", "_done", "_looked_at")

    def __init__(self, model: Any, done: Callable[[DeadShares], None]) -> None:
        self._activations = activations_of(model)
        self._done = done
        self._dead: dict[str, Any] = {}
        self._looked_at: set[str] = set()
        torch = sys.modules["torch"]
        modules = list(model.modules()) if self._activations else []
        self._convolved = {m.out_channels for m in modules if isinstance(m, (torch.nn.Conv1d, torch.nn.ConvTranspose1d))}
        self._convolved -= {m.out_features for m in modules if isinstance(m, torch.nn.Linear)}

    def __bool__(self) -> bool:
        return bool(self._activations)

    def call(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The root model's call, looked at."""
        handles: list[Any] = []
        try:
            for name, module in self._activations:
                handles.append(module.register_forward_hook(self._watch(name)))
        except Exception as error:  # noqa: BLE001 - it must not reach the training loop
            failed(_NAME, error)
        try:
            return call(*args, **kwargs)
        finally:
            for handle in handles:
                handle.remove()
            self._finish()

    def _watch(self, name: str) -> Callable[[Any, Any, Any], None]:
        def hook(module: Any, inputs: Any, output: Any) -> None:  # noqa: ARG001 - the signature torch calls
            try:
                if name not in self._looked_at and isinstance(output, sys.modules["torch"].Tensor):
                    self._looked_at.add(name)
                    self._look(name, module, output)
            except Exception as error:  # noqa: BLE001 - it must not reach the training loop
                failed(_NAME, error)

        return not_traced(hook, nor_what_it_calls=True)

    def _look(self, name: str, module: Any, output: Any) -> None:
        output = output.detach()
        if output.dim() < 2 or not output.numel():
            return
        unit = self._unit_dimension(output)
        output = output[: max(1, _MOST_NUMBERS * output.shape[0] // output.numel())]
        rows = output.numel() // output.shape[unit]
        with sys.modules["torch"].no_grad():
            dead = output.amax([dimension for dimension in range(output.dim()) if dimension != unit]) == 0  # NaN is not zero
            before, more = _suspects.pop(module, (None, 0))
            if before is not None and before.shape == dead.shape and before.device == dead.device:
                dead, rows = dead & before, rows + more
            if rows < LEAST_ROWS:
                _suspects[module] = dead, rows
            else:
                self._dead[name] = dead.float().mean()

    def _unit_dimension(self, output: Any) -> int:
        """Channels of a convolution, features of anything else."""
        if output.dim() > 3 or (output.dim() == 3 and output.shape[1] in self._convolved):
            return 1
        return int(output.dim()) - 1

    def _finish(self) -> None:
        try:
            if self._dead:
                together: dict[Any, list[str]] = {}
                for name, share in self._dead.items():
                    together.setdefault(share.device, []).append(name)
                torch = sys.modules["torch"]
                readings = [(collect(torch.stack([self._dead[name] for name in names])), names) for names in together.values()]
                self._done(DeadShares([(reading, names) for reading, names in readings if reading is not None]))
        except Exception as error:  # noqa: BLE001 - it must not reach the training loop
            failed(_NAME, error)
        self._activations, self._dead = [], {}


_NAME = f"{__name__}.DeadUnits"


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
