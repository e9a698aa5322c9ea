"""Finds which model an optimizer trains and which other optimizers exist, where the script did not name them.

It searches the live objects once (100 ms for 170,000 of them), after the first step, and only where `attach(model)` did
not name a model. It keeps weak references only.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from perfagent.boundary.gc_instances import instances_of
from perfagent.measure.tensor_storage import numbers_in

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

__all__ = ["has_optimizer", "numbers_trained", "own_count", "parameters_by_id", "root_of", "search"]


def parameters_by_id(optimizer: Optimizer) -> dict[int, nn.Parameter]:
    return {id(p): p for group in optimizer.param_groups for p in group["params"]}


def numbers_trained(optimizer: Optimizer) -> int:
    """Returns how many numbers an optimizer trains."""
    return sum(map(numbers_in, parameters_by_id(optimizer).values()))


def own_count(optimizer: Optimizer) -> int:
    """The steps that the optimizer itself counted; 0 where it counts none, or on a device, for which nothing waits."""
    count = next((one["step"] for one in optimizer.state.values() if isinstance(one, dict) and "step" in one), 0)
    return int(count) if isinstance(count, int) or getattr(count, "is_cpu", False) else 0


def search(*, models: bool) -> tuple[list[nn.Module], list[Optimizer]]:
    """Returns the modules and the optimizers of the process, except objects that `gc.freeze()` hid. models: False
    leaves out the modules."""
    torch = sys.modules["torch"]
    kind = torch.optim.Optimizer
    found = instances_of(kind, torch.nn.Module) if models else instances_of(kind)
    modules = [thing for thing in found if not issubclass(type(thing), kind)]
    return modules, [thing for thing in found if issubclass(type(thing), kind) and "param_groups" in thing.__dict__]


def has_optimizer() -> bool:
    """True if the process has any of torch's optimizers. Slow (boundary/gc_instances.py)."""
    return bool(search(models=False)[1])


def root_of(optimizer: Optimizer, modules: Sequence[nn.Module]) -> nn.Module | None:
    """Returns the root module that holds most of the optimizer's parameters, or None. If several hold equally many, as
    losses that share a model do, returns the outermost module that they share, else the first root."""
    children = {id(child) for module in modules for child in _children(module)}
    wanted = set(parameters_by_id(optimizer))

    def covered(module: nn.Module) -> int:
        parameters = (one.__dict__.get("_parameters", {}).values() for one in _modules(module))
        return len(wanted & {id(parameter) for several in parameters for parameter in several})

    held = [(covered(module), module) for module in modules if id(module) not in children]
    most = max((count for count, _ in held), default=0)
    if not most:
        return None
    first, *others = [module for count, module in held if count == most]
    if not others:
        return first
    inner = set.intersection(*({id(module) for module in _modules(root)} for root in (first, *others)))
    shared = (module for module in _modules(first) if id(module) in inner)
    return next((module for module in shared if covered(module) == most), first)


def _children(module: nn.Module) -> list[nn.Module]:
    # a module whose __init__ did not call super() has neither of the two dicts
    return [child for child in module.__dict__.get("_modules", {}).values() if child is not None]


def _modules(module: nn.Module) -> Iterator[nn.Module]:
    """Yields the module and all modules in it, each before those that it holds."""
    seen, waiting = set(), deque([module])
    while waiting:
        current = waiting.popleft()
        if id(current) not in seen:
            seen.add(id(current))
            yield current
            waiting.extend(_children(current))
