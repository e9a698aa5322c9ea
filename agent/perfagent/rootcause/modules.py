"""One-shot checks of what each module puts out, in forward order: put on after a bad step, gone after the next ones.

The check stands where `module.compile()` would put a compiled call, as the watch of the root does (hooks/forward.py): it is left
out of copies and pickles, costs nothing once it is gone, and no hook of the user's sees it. Modules that torch.compile has
compiled are looked at from outside only. Values on a device are counted there and read when they have arrived.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from threading import get_ident
from typing import Any

from perfagent.device import Reading, collect
from perfagent.hooks.guard import not_traced
from perfagent.rootcause.batch import Fingerprint, tensors_in
from perfagent.rootcause.containment import contained

__all__ = ["OutputChecks", "is_closed", "walk"]

MOST_MODULES = 4000
_CALL = "_compiled_call_impl"


def is_closed(module: Any) -> bool:
    """Whether what lies below is not to be touched: the module is compiled or scripted, or DataParallel copies its `__dict__`."""
    torch = sys.modules["torch"]
    own = module.__dict__.get(_CALL)
    compiled = own is not None and not type(own).__module__.startswith("perfagent.")
    compiled = compiled or type(module).__name__ == "OptimizedModule"
    return compiled or isinstance(module, (torch.jit.ScriptModule, torch.nn.DataParallel))


def walk(model: Any) -> Iterator[tuple[str, Any]]:
    """(name, module) of what can be looked at: nothing below a compiled or scripted module. Wrappers' own names are left out."""
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
        children = [(child_name, child) for child_name, child in module.__dict__.get("_modules", {}).items() if child is not None]
        for child_name, child in reversed(children):
            wrapper = child_name in ("module", "_orig_mod") and len(children) == 1 and not name
            waiting.append((name if wrapper else f"{name}.{child_name}" if name else child_name, child))


class OutputChecks:
    """Checks on every module of a model for the steps between `install` and `remove`. `first_bad()` once `ready()`."""

    def __init__(self, model: Any, thread: int) -> None:
        self._thread = thread
        self._checks: list[_Check] = []
        self._order: list[_Check] = []
        self._counts: dict[Any, Any] = {}
        self._readings: list[tuple[list[tuple[_Check, int]], Reading]] = []
        self._places: dict[Any, list[tuple[_Check, int]]] = {}
        self.batch: Fingerprint | None = None
        self.step = 0
        self.calls = 0
        for name, module in walk(model):
            self._checks.append(_Check(self, name, module, root=not self._checks))

    def install(self, step: int) -> None:
        """From here on, until `remove`. step: the one that is about to begin."""
        self.step = step
        for check in self._checks:
            check.put_on()

    def remove(self) -> None:
        for check in reversed(self._checks):
            check.take_off()

    def collect(self) -> None:
        """The step is over: what was counted on a device is on its way."""
        for device, counts in self._counts.items():
            reading = collect(counts)
            if reading is not None:
                self._readings.append((self._places[device], reading))
        self._counts, self._places = {}, {}

    def ready(self) -> bool:
        """Never blocks."""
        return all(reading.ready() for _, reading in self._readings)

    def settle(self) -> None:
        """Reads what arrived; once ready."""
        for places, reading in self._readings:
            numbers = reading.values()
            for check, place in places:
                check.bad_in, check.bad_out = int(numbers[2 * place]), int(numbers[2 * place + 1])
        self._readings = []

    def first_bad(self) -> dict[str, Any] | None:
        """The first module, in the order in which they returned, whose output was not finite."""
        for check in self._order:
            if check.bad_out:
                return check.shown()
        return None

    def count(self, check: _Check, entering: list[Any], leaving: list[Any]) -> None:
        """Counts what is not finite in what a module was given and in what it gave."""
        torch = sys.modules["torch"]
        self._order.append(check)
        with torch.no_grad():
            bad_in, bad_out = _nonfinite(entering), _nonfinite(leaving)
            for side, tensors in ((0, bad_in), (1, bad_out)):
                for tensor in tensors:
                    if tensor.is_cpu:
                        number = int(tensor.item())
                        check.bad_in += number if side == 0 else 0
                        check.bad_out += number if side == 1 else 0
                    elif tensor.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                        continue
                    else:
                        counts = self._counts.get(tensor.device)
                        if counts is None:
                            counts = self._counts[tensor.device] = torch.zeros(
                                2 * len(self._checks), dtype=torch.float32, device=tensor.device
                            )
                            self._places[tensor.device] = []
                        places = self._places[tensor.device]
                        if not places or places[-1][0] is not check:
                            places.append((check, len(places)))
                        counts[2 * places[-1][1] + side].add_(tensor)  # on the device: nothing is read here


def _nonfinite(tensors: list[Any]) -> list[Any]:
    torch = sys.modules["torch"]
    counted = []
    for tensor in tensors:
        local = getattr(tensor, "_local_tensor", tensor).detach()
        if (local.is_floating_point() or local.is_complex()) and local.layout is torch.strided and local.device.type != "meta":
            counted.append((~torch.isfinite(local)).sum())
    return counted


class _Check:
    """Stands in one module's call for a step."""

    __slots__ = ("_before", "_had", "_kept", "_owner", "_root", "bad_in", "bad_out", "called", "name", "outputs")

    def __init__(self, owner: OutputChecks, name: str, module: Any, *, root: bool) -> None:
        self._owner, self._kept, self.name, self._root = owner, weakref.ref(module), name, root
        self._before: Callable[..., Any] | None = None
        self._had = self.called = False
        self.bad_in = self.bad_out = 0
        self.outputs: list[tuple[str, list[int], str, int]] = []

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    def put_on(self) -> None:
        module = self._kept()
        if module is not None and module.__dict__.get(_CALL) is not self:
            self._had = _CALL in module.__dict__
            self._before = module.__dict__.get(_CALL)
            module.__dict__[_CALL] = self

    def take_off(self) -> None:
        module = self._kept()
        if module is None or module.__dict__.get(_CALL) is not self:
            return
        if self._had:
            module.__dict__[_CALL] = self._before
        else:
            del module.__dict__[_CALL]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self._kept()  # it lives: it is calling us
        call = self._before or module._call_impl
        owner = self._owner
        if self.called or owner._thread != get_ident():
            return call(*args, **kwargs)
        if self._root and owner.batch is None:
            self._take_batch(args, kwargs)
        output = call(*args, **kwargs)
        self._look(args, kwargs, output)
        return output

    @contained
    def _take_batch(self, args: Any, kwargs: Any) -> None:
        batch = Fingerprint(self._owner.step, "what the model was called with", tensors_in(_named(self._kept(), args, kwargs)))
        self._owner.batch = batch or None

    @contained
    def _look(self, args: Any, kwargs: Any, output: Any) -> None:
        if self.called:  # the module calls itself
            return
        self.called = True
        leaving = [tensor for _, tensor in tensors_in(output)][:8]
        entering = [tensor for _, tensor in tensors_in((args, kwargs))][:8]
        self.outputs = [
            (name, [int(size) for size in tensor.shape], str(tensor.dtype).removeprefix("torch."), int(tensor.numel()))
            for (name, tensor), _ in zip(tensors_in(output), range(4), strict=False)
        ]
        self._owner.count(self, entering, leaving)

    def shown(self) -> dict[str, Any]:
        module = self._kept()
        size = sum(output[3] for output in self.outputs) or 1
        found: dict[str, Any] = {
            "module": self.name or "(the model itself)", "class": type(module).__name__ if module is not None else "",
            "step": self._owner.step, "nonfinite": self.bad_out, "share": min(1.0, self.bad_out / size),
            "inputs_finite": not self.bad_in,
        }  # fmt: skip
        if self.outputs:
            found |= {"shape": self.outputs[0][1], "dtype": self.outputs[0][2]}
        return found


not_traced(_Check.__call__)


def _named(model: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments by the names that the model's forward gives them."""
    code = getattr(getattr(type(model), "forward", None), "__code__", None)
    names = code.co_varnames[1 : code.co_argcount] if code is not None else ()
    return {names[place] if place < len(names) else str(place): value for place, value in enumerate(args)} | dict(kwargs)
