"""Checks the output of each module in forward order for a few steps: installed after a bad step, removed after the next
ones.

The check stands where `module.compile()` would put a compiled call, as the watch of the root does (hooks/forward.py):
it is left out of copies and pickles, costs nothing once it is gone, and no hook of the user's sees it. Modules that
torch.compile has compiled are looked at from outside only. Values on a device are counted there and read when they have
arrived.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from itertools import islice
from threading import get_ident
from typing import Any

from perfagent.boundary.call_slot import CALL, copy_that_calls
from perfagent.boundary.dynamo import not_traced
from perfagent.boundary.guard import guarded
from perfagent.device import Reading, collect, is_captured
from perfagent.rootcause.batch import Fingerprint, can_be_counted, count_nonfinite, tensors_in
from perfagent.wire.evidence import ITSELF, BadModule

__all__ = ["OutputChecks", "is_closed", "walk"]

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
                check.bad_in, check.bad_out, check.below_out = (
                    int(number) for number in numbers[3 * place : 3 * place + 3]
                )
        self._readings = []

    def first_bad(self) -> BadModule | None:
        """The first module, in the order in which they returned, whose output held NaN or +inf."""
        return next((check.shown() for check in self._order if check.bad_out), None)

    def first_below(self) -> BadModule | None:
        """The first one whose output held -inf, as a mask does in a healthy training."""
        found = next((check.shown() for check in self._order if check.below_out), None)
        return None if found is None else {**found, "only_minus_infinity": True}

    def count(self, check: _Check, entering: list[Any], leaving: list[Any]) -> None:
        """Counts what is NaN or +inf in what a module was given and in what it gave, and apart from it what is -inf in
        that."""
        torch = sys.modules["torch"]
        self._order.append(check)
        with torch.no_grad():
            for tensors, leaves in ((entering, False), (leaving, True)):
                for tensor in tensors:
                    if is_captured(tensor):
                        continue  # it would become part of the user's graph
                    bad, below = count_nonfinite(tensor)
                    if tensor.is_cpu:
                        check.add(int(bad.item()), int(below.item()), leaves=leaves)
                    else:
                        at = self._place(check, tensor.device)
                        at[int(leaves)].add_(bad - below)  # on the device: nothing is read here
                        if leaves:
                            at[2].add_(below)

    def _place(self, check: _Check, device: Any) -> Any:
        """The counts of a module on a device: entering, leaving, and leaving as -inf."""
        counts = self._counts.get(device)
        if counts is None:
            torch = sys.modules["torch"]
            counts = self._counts[device] = torch.zeros(3 * len(self._checks), dtype=torch.float32, device=device)
            self._places[device] = []
        places = self._places[device]
        if not places or places[-1][0] is not check:
            places.append((check, len(places)))
        at = 3 * places[-1][1]
        return counts[at : at + 3]


def _counted(values: Any) -> Iterator[Any]:
    """The tensors in what a module was given or gave that can be counted, the first eight."""
    for _, tensor in islice(tensors_in(values), 8):
        local = getattr(tensor, "_local_tensor", tensor).detach()
        if can_be_counted(local):
            yield local


class _Check:
    """Stands in one module's call for a step."""

    __slots__ = (
        "_before",
        "_had",
        "_kept",
        "_owner",
        "_root",
        "bad_in",
        "bad_out",
        "below_out",
        "called",
        "name",
        "outputs",
    )

    def __init__(self, owner: OutputChecks, name: str, module: Any, *, root: bool) -> None:
        self._owner, self._kept, self.name, self._root = owner, weakref.ref(module), name, root
        self._before: Callable[..., Any] | None = None
        self._had = self.called = False
        self.bad_in = self.bad_out = self.below_out = 0
        self.outputs: list[tuple[str, list[int], str, int]] = []

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    def put_on(self) -> None:
        module = self._kept()
        if module is not None and module.__dict__.get(CALL) is not self:
            self._had = CALL in module.__dict__
            self._before = module.__dict__.get(CALL)
            module.__dict__[CALL] = self

    def take_off(self) -> None:
        module = self._kept()
        if module is None or module.__dict__.get(CALL) is not self:
            return
        if self._had:
            module.__dict__[CALL] = self._before
        else:
            del module.__dict__[CALL]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self._kept()
        copy = copy_that_calls(sys._getframe(1), module)
        if copy is not None:
            return copy._call_impl(*args, **kwargs)
        call = self._before or module._call_impl  # it lives: it is calling us
        owner = self._owner
        if self.called or owner._thread != get_ident():
            return call(*args, **kwargs)
        if self._root and owner.batch is None:
            self._take_batch(args, kwargs)
        output = call(*args, **kwargs)
        self._look(args, kwargs, output)
        return output

    @guarded
    def _take_batch(self, args: Any, kwargs: Any) -> None:
        batch = Fingerprint(
            self._owner.step, "what the model was called with", tensors_in(_named(self._kept(), args, kwargs))
        )
        self._owner.batch = batch or None

    @guarded
    def _look(self, args: Any, kwargs: Any, output: Any) -> None:
        if self.called:  # the module calls itself
            return
        self.called = True
        self.outputs = [
            (name, [int(size) for size in tensor.shape], str(tensor.dtype).removeprefix("torch."), int(tensor.numel()))
            for (name, tensor), _ in zip(tensors_in(output), range(4), strict=False)
        ]
        self._owner.count(self, [*_counted((args, kwargs))], [*_counted(output)])

    def add(self, bad: int, below: int, *, leaves: bool) -> None:
        """bad: how many values are not finite; below: how many of them are -inf."""
        if leaves:
            self.bad_out += bad - below
            self.below_out += below
        else:
            self.bad_in += bad - below

    def shown(self) -> BadModule:
        module = self._kept()
        size = sum(output[3] for output in self.outputs) or 1
        bad = self.bad_out + self.below_out
        found: BadModule = {
            "module": self.name or ITSELF, "class": type(module).__name__ if module is not None else "",
            "step": self._owner.step, "nonfinite": bad, "share": min(1.0, bad / size),
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
    return {names[place] if place < len(names) else str(place): value for place, value in enumerate(args)} | dict(
        kwargs
    )
