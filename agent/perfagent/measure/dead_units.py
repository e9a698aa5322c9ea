"""Finds dead units: units of a ReLU that are zero for every sample of a batch and so pass no gradient on.

One training call of the root model is checked now and then. In a small batch a healthy unit is often zero everywhere
(every second one for a single sample). So a share is reported once LEAST_ROWS samples or positions were seen, in
several calls if needed, and dead units are those that were zero in all of them. The hook of all modules is added when
that call begins and removed when it returns: outside of it nothing of ours is on a module, so copies, pickles and
torch.compile never meet a hook. Models that are compiled, scripted or replicated over devices are left alone. A
functional relu cannot be seen: such a model has no such series.

The units of a Linear are in the last dimension, those of a convolution in the second. So the newest layer before the
activation tells where they are; if its result had another shape, an activation with more than two dimensions is left out.
Of a module that is called several times in a call of the model, the first call is checked.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from perfagent.boundary.dynamo import compiled
from perfagent.boundary.guard import guarded
from perfagent.device import is_captured, read_later
from perfagent.libraries import RECTIFIERS
from perfagent.step.gradients import DeadShares

if TYPE_CHECKING:
    from torch import Tensor, device, nn

__all__ = ["DeadUnits", "activations_of"]

KINDS = frozenset(("ReLU", "ReLU6", *RECTIFIERS))
"""Activations that are zero when off, and never negative."""
MOST_MODULES = 64
_MOST_NUMBERS = 2**22
"""Most numbers of an output to check; further samples are left out."""
LEAST_ROWS = 64
"""Samples times positions for which a unit must be zero. Of a random network's units, 30 % look dead in 2
rows, none in 64."""
_suspects: WeakKeyDictionary[nn.Module, tuple[Tensor, int]] = WeakKeyDictionary()
"""Which units of a module were zero in every row so far (on the device), and the number of rows; kept until there are
enough rows."""


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

    __slots__ = ("_activations", "_dead", "_done", "_newest", "cost_ns")

    def __init__(self, model: nn.Module, done: Callable[[DeadShares], None]) -> None:
        self.cost_ns = 0
        self._activations = {module: name for name, module in activations_of(model)}
        self._done = done
        self._dead: dict[str, Tensor] = {}
        self._newest: tuple[tuple[int, ...], int] | None = None
        """The shape of the newest layer's result, and the dimension of its units."""

    def __bool__(self) -> bool:
        return bool(self._activations)

    def call(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Runs the root model's call and checks its activations."""
        hook = sys.modules["torch"].nn.modules.module.register_module_forward_hook(self._called)
        try:
            return call(*args, **kwargs)
        finally:
            hook.remove()
            self._finish()

    @guarded
    def _called(self, module: nn.Module, _inputs: object, output: object) -> None:
        began, torch = perf_counter_ns(), sys.modules["torch"]
        name = self._activations.get(module)
        if isinstance(output, torch.Tensor):
            if name is None:
                dimension = _units_in(module, output)
                self._newest = self._newest if dimension is None else (tuple(output.shape), dimension)
            elif name not in self._dead and output.dim() >= 2 and output.numel() and not is_captured(output):
                newest = self._newest
                known = newest is not None and newest[0] == tuple(output.shape)
                if output.dim() == 2 or known:
                    self._check(name, module, output.detach(), newest[1] if newest is not None and known else 1)
        self.cost_ns += perf_counter_ns() - began

    def _check(self, name: str, module: nn.Module, output: Tensor, dimension: int) -> None:
        output = output[: max(1, _MOST_NUMBERS * output.shape[0] // output.numel())]
        rows = output.numel() // output.shape[dimension]
        with sys.modules["torch"].no_grad():
            dead = output.amax([other for other in range(output.dim()) if other != dimension]) == 0  # NaN is not zero
            before, more = _suspects.pop(module, (None, 0))
            if before is not None and before.shape == dead.shape and before.device == dead.device:
                dead, rows = dead & before, rows + more
            if rows < LEAST_ROWS:
                _suspects[module] = dead, rows
            self._dead[name] = dead

    @guarded
    def _finish(self) -> None:
        began, torch = perf_counter_ns(), sys.modules["torch"]
        together: dict[device, dict[str, Tensor]] = {}
        for module, name in self._activations.items():
            dead = self._dead.get(name)
            if dead is not None and module not in _suspects:
                together.setdefault(dead.device, {})[name] = dead.float().mean()
        with torch.no_grad():
            found = [(read_later(torch.stack([*shares.values()])), [*shares]) for shares in together.values()]
        readings = [(reading, names) for reading, names in found if reading is not None]
        if readings:
            self._done(DeadShares(readings))
        self._activations, self._dead = {}, {}
        self.cost_ns += perf_counter_ns() - began


def _units_in(module: nn.Module, output: Tensor) -> int | None:
    """The dimension of a layer's result that holds its units; None for other modules, and for a single sample."""
    nn = sys.modules["torch"].nn
    if isinstance(module, (nn.Linear, nn.Bilinear, nn.Embedding)) or type(module).forward is nn.LayerNorm.forward:
        return output.dim() - 1
    if isinstance(module, nn.modules.conv._ConvNd):
        return 1 if output.dim() == len(module.kernel_size) + 2 else None
    return 1 if isinstance(module, (nn.modules.batchnorm._NormBase, nn.GroupNorm)) else None
