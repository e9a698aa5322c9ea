"""Checks the output of each module in forward order for a few steps: installed after a bad step, removed after the next
ones.

The check stands where `module.compile()` would put a compiled call, as the watch of the root does (hooks/forward.py):
it is left out of copies and pickles, costs nothing once it is gone, and no hook of the user's sees it. Modules that
torch.compile has compiled are looked at from outside only. Values on a device are counted there and read when they have
arrived.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import islice
from threading import get_ident
from typing import TYPE_CHECKING, Any

from perfagent.boundary.call_slot import CALL, CallSlot, copy_that_calls
from perfagent.boundary.dynamo import not_traced
from perfagent.boundary.guard import guarded
from perfagent.causes.batch import Fingerprint, can_be_counted, count_nonfinite, tensors_in
from perfagent.device import Reading, is_captured, read_later
from perfagent.wire.evidence import ITSELF, BadModule

if TYPE_CHECKING:
    from torch import Size, Tensor, nn

__all__ = ["CALLED_WITH", "OutputChecks", "argument_names", "is_closed", "walk"]

CALLED_WITH = "what the model was called with"
"""Where a batch was found."""

MOST_MODULES = 4000


def is_closed(module: Any) -> bool:
    """Whether what lies below is not to be touched: the module is compiled or scripted, or DataParallel copies its
    `__dict__`."""
    torch = sys.modules["torch"]
    own = module.__dict__.get(CALL)
    compiled = own is not None and not type(own).__module__.startswith("perfagent.")
    compiled = compiled or type(module).__name__ == "OptimizedModule"
    return compiled or isinstance(module, (torch.jit.ScriptModule, torch.nn.DataParallel))


def walk(model: Any) -> Iterator[tuple[str, Any]]:
    """(name, module) of what can be looked at: nothing below a compiled or scripted module. Wrappers' own names are
    left out."""
    seen: set[int] = set()
    waiting: list[tuple[str, Any]] = [("", model)]
    count = 0
    while waiting and count < MOST_MODULES:
        name, module = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        count += 1
        yield name, module
        if is_closed(module):
            continue
        children = [
            (child_name, child)
            for child_name, child in module.__dict__.get("_modules", {}).items()
            if child is not None
        ]
        for child_name, child in reversed(children):
            wrapper = child_name in ("module", "_orig_mod") and len(children) == 1 and not name
            waiting.append((name if wrapper else f"{name}.{child_name}" if name else child_name, child))


class OutputChecks:
    """Checks on every module of a model for the step between `install` and `remove`. `first_bad()` once `ready()`."""

    def __init__(self, model: Any, thread: int) -> None:
        self.thread, self.step = thread, 0
        self.batch: Fingerprint | None = None
        self._checks = [_Check(self, name, module, root=module is model) for name, module in walk(model)]
        self._order: list[_Check] = []
        self._counts: dict[Any, list[tuple[_Check, Tensor]]] = {}
        self._readings: list[tuple[list[_Check], Reading]] = []

    def install(self, step: int) -> None:
        """step: the one that is about to begin."""
        self.step = step
        for check in self._checks:
            check.put_on()

    def remove(self) -> None:
        """The step is over: what was counted on a device is on its way."""
        for check in reversed(self._checks):
            check.take_off()
        for counted in self._counts.values():
            reading = read_later(sys.modules["torch"].stack([counts for _, counts in counted]))
            if reading is not None:
                self._readings.append(([check for check, _ in counted], reading))
        self._counts = {}

    def ready(self) -> bool:
        """Never blocks."""
        return all(reading.ready() for _, reading in self._readings)

    def _settle(self) -> None:
        for checks, reading in self._readings:
            numbers = iter(reading.values())
            for check in checks:
                check.bad_in += int(next(numbers))
                check.bad_out += int(next(numbers))
        self._readings = []

    def first_bad(self) -> BadModule | None:
        """The first module, in the order in which they returned, whose output held NaN or +inf. Once ready."""
        self._settle()
        return next((check.shown() for check in self._order if check.bad_out), None)

    def count(self, check: _Check, given: object, output: object) -> None:
        """Counts on its device what is NaN or +inf in what a module was given and in what it gave; -inf is what masks
        hold in healthy trainings."""
        torch = sys.modules["torch"]
        self._order.append(check)
        of_check: dict[Any, Tensor] = {}
        with torch.no_grad():
            for place, tensor in [*((0, one) for one in _counted(given)), *((1, one) for one in _counted(output))]:
                if is_captured(tensor):
                    continue  # it would become part of the user's graph
                counts = of_check.get(tensor.device)
                if counts is None:
                    counts = of_check[tensor.device] = torch.zeros(2, dtype=torch.int64, device=tensor.device)
                bad, below = count_nonfinite(tensor)
                counts[place].add_(bad - below)
        for device, counts in of_check.items():
            self._counts.setdefault(device, []).append((check, counts))


def _counted(values: object) -> Iterator[Tensor]:
    """The tensors in what a module was given or gave that can be counted, the first eight."""
    for _, tensor in islice(tensors_in(values), 8):
        local = getattr(tensor, "_local_tensor", tensor).detach()
        if can_be_counted(local):
            yield local


class _Check(CallSlot):
    """Stands in one module's call for a step."""

    __slots__ = ("_owner", "_root", "bad_in", "bad_out", "called", "name", "outputs")

    def __init__(self, owner: OutputChecks, name: str, module: nn.Module, *, root: bool) -> None:
        super().__init__(module)
        self._owner, self.name, self._root = owner, name, root
        self.called = False
        self.bad_in = self.bad_out = 0
        self.outputs: list[tuple[Size, Any]] = []

    def put_on(self) -> None:
        module = self._module()
        if module is not None and module.__dict__.get(CALL) is not self:
            super().put_on()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self._module()
        copy = copy_that_calls(sys._getframe(1), module)
        if copy is not None:
            return copy._call_impl(*args, **kwargs)
        call = self._replaced or module._call_impl  # it lives: it is calling us
        owner = self._owner
        if self.called or owner.thread != get_ident():
            return call(*args, **kwargs)
        if self._root and owner.batch is None:
            self._take_batch(args, kwargs)
        output = call(*args, **kwargs)
        self._look(args, kwargs, output)
        return output

    @guarded
    def _take_batch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        names = argument_names(self._module())
        given = {names.get(str(place), str(place)): value for place, value in enumerate(args)} | kwargs
        self._owner.batch = Fingerprint(self._owner.step, CALLED_WITH, tensors_in(given)) or None

    @guarded
    def _look(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: object) -> None:
        if self.called:  # the module calls itself
            return
        self.called = True
        self.outputs = [(tensor.shape, tensor.dtype) for _, tensor in islice(tensors_in(output), 4)]
        self._owner.count(self, (args, kwargs), output)

    def shown(self) -> BadModule:
        size = sum(shape.numel() for shape, _ in self.outputs) or 1
        found: BadModule = {
            "module": self.name or ITSELF, "class": type(self._module()).__name__, "step": self._owner.step,
            "nonfinite": self.bad_out, "share": min(1.0, self.bad_out / size), "inputs_finite": not self.bad_in,
        }  # fmt: skip
        if self.outputs:
            shape, dtype = self.outputs[0]
            found |= {"shape": [*shape], "dtype": str(dtype).removeprefix("torch.")}
        return found


not_traced(_Check.__call__)


def argument_names(model: Any) -> dict[str, str]:
    """The names that the model's forward gives its arguments, by their place."""
    code = getattr(getattr(type(model), "forward", None), "__code__", None)
    names = code.co_varnames[1 : code.co_argcount] if code is not None else ()
    return {str(place): name for place, name in enumerate(names)}
