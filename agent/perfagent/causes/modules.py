"""Checks the output of each module in one training call of the root model, in the steps that follow a bad one.

A probe of that call (step/state.py): one hook of all modules, added when it begins and removed when it returns. Nothing
of ours is on a module, so copies, pickles and torch.compile never meet it; where anything was compiled, no module is
checked. Values on a device are counted there and read when they have arrived.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from perfagent.boundary.dynamo import compiled
from perfagent.boundary.guard import guarded
from perfagent.causes.batch import Fingerprint, can_be_counted, count_nonfinite
from perfagent.device import Reading, is_captured, read_later
from perfagent.measure.batches.places import places_in
from perfagent.wire.evidence import ITSELF, BadModule, Reason

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

__all__ = ["CALLED_WITH", "OutputChecks", "argument_names"]

CALLED_WITH: Reason = {"key": "called_with"}
"""Where a batch was found."""
_MOST_TENSORS = 8


class OutputChecks:
    """The checks of one step. names: of the model's modules. batch: what the model was called with. `first_bad()` once
    `ready()`."""

    def __init__(self, model: nn.Module, names: Mapping[nn.Module, str], step: int) -> None:
        self.step = step
        self.was_called = False
        self.batch: Fingerprint | None = None
        self._arguments, self._left = argument_names(model), WeakKeyDictionary(names)
        self._found: list[BadModule] = []
        self._counts: dict[torch.device, list[tuple[BadModule, Tensor]]] = {}
        self._readings: list[tuple[list[BadModule], Reading]] = []

    def call(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a call of the root model with the outputs of its modules checked."""
        self._begin(args, kwargs)
        if compiled():
            return call(*args, **kwargs)
        hook = sys.modules["torch"].nn.modules.module.register_module_forward_hook(self._returned)
        try:
            return call(*args, **kwargs)
        finally:
            hook.remove()
            self._finish()

    @guarded
    def _begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.was_called = True
        given = {self._arguments.get(str(place), str(place)): value for place, value in enumerate(args)} | kwargs
        named = [(place.label, place.tensor) for place in places_in(given)]
        self.batch = Fingerprint(self.step, CALLED_WITH, named) if named else None

    @guarded
    def _returned(self, module: nn.Module, inputs: object, output: object) -> None:
        name, outputs = self._left.pop(module, None), _countable(output)  # of a module that is called again the first
        if name is None or not outputs or is_captured(outputs[0]):
            return
        first, given = outputs[0], _countable(inputs)
        shown: BadModule = {
            "module": name or ITSELF, "class": type(module).__name__, "step": self.step, "shape": [*first.shape],
            "dtype": str(first.dtype).removeprefix("torch."), "share": float(sum(one.numel() for one in outputs)),
        }  # fmt: skip
        if given:  # keyword arguments are not seen
            shown["inputs_finite"] = True
        self._found.append(shown)
        torch = sys.modules["torch"]
        with torch.no_grad():
            counts = torch.stack([_bad(tensors, first.device) for tensors in (given, outputs)])
        self._counts.setdefault(first.device, []).append((shown, counts))

    @guarded
    def _finish(self) -> None:
        for counted in self._counts.values():
            reading = read_later(sys.modules["torch"].stack([counts for _, counts in counted]))
            if reading is not None:
                self._readings.append(([shown for shown, _ in counted], reading))
        self._counts = {}

    def ready(self) -> bool:
        """Never blocks."""
        return all(reading.ready() for _, reading in self._readings)

    def first_bad(self) -> BadModule | None:
        """The first module, in the order in which they returned, whose output held NaN or +inf. Once ready."""
        for found, reading in self._readings:
            numbers = iter(reading.values())
            for shown in found:
                bad_in, bad_out = int(next(numbers)), int(next(numbers))
                shown |= {"nonfinite": bad_out, "share": bad_out / shown["share"]}
                if bad_in:
                    shown["inputs_finite"] = False
        self._readings = []
        return next((shown for shown in self._found if shown.get("nonfinite")), None)


def _countable(values: object) -> list[Tensor]:
    """The tensors in what a module was given or gave that can be counted, the first eight."""
    found = (getattr(place.tensor, "_local_tensor", place.tensor).detach() for place in places_in(values))
    return [tensor for tensor in islice(found, _MOST_TENSORS) if tensor.numel() and can_be_counted(tensor)]


def _bad(tensors: list[Tensor], device: torch.device) -> Tensor:
    """How many numbers on this device are NaN or +inf: -inf is what masks hold in healthy trainings."""
    torch = sys.modules["torch"]
    counts = [count_nonfinite(tensor) for tensor in tensors if tensor.device == device]
    total: Tensor = torch.stack([torch.zeros(2, dtype=torch.int64, device=device), *counts]).sum(0)
    return total[0] - total[1]


def argument_names(model: nn.Module | None) -> dict[str, str]:
    """The names that the model's forward gives its arguments, by their place."""
    code = getattr(getattr(type(model), "forward", None), "__code__", None)
    names = code.co_varnames[1 : code.co_argcount] if code is not None else ()
    return {str(place): name for place, name in enumerate(names)}
