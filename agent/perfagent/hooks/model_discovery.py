"""Finds which model an optimizer trains and which other optimizers exist, where the script did not name them.

It searches the live objects once (100 ms for 170,000 of them), after the first step, and only where `attach(model)` did
not name a model. It keeps weak references only.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from perfagent.boundary.gc_instances import living
from perfagent.signals.tensor_storage import numbers_in

__all__ = ["has_optimizer", "owned", "parameters_of", "root_of", "search"]


def parameters_of(optimizer: Any) -> dict[int, Any]:
    """Returns the optimizer's parameters by id."""
    return {id(p): p for group in optimizer.param_groups for p in group["params"]}


def owned(optimizer: Any) -> int:
    """Returns how many numbers an optimizer trains."""
    return sum(map(numbers_in, parameters_of(optimizer).values()))


def search(*, models: bool) -> tuple[list[Any], list[Any]]:
    """Returns the modules and the optimizers of the process, except objects that `gc.freeze()` hid. models: False
    leaves out the modules."""
    torch = sys.modules["torch"]
    optimizer_type = torch.optim.Optimizer
    modules: list[Any] = []
    optimizers: list[Any] = []
    for thing in living(optimizer_type, torch.nn.Module) if models else living(optimizer_type):
        if not issubclass(type(thing), optimizer_type):
            modules.append(thing)
        elif "param_groups" in thing.__dict__:
            optimizers.append(thing)
    return modules, optimizers


def has_optimizer() -> bool:
    """True if the process has any of torch's optimizers. Slow (boundary/gc_instances.py)."""
    return any("param_groups" in thing.__dict__ for thing in living(sys.modules["torch"].optim.Optimizer))


def root_of(optimizer: Any, modules: Sequence[Any]) -> Any:
    """Returns the root module that holds most of the optimizer's parameters, or None. If several hold equally many, as
    losses that share a model do, returns the module that they share."""
    children = {id(child) for module in modules for child in _children(module)}
    wanted = set(parameters_of(optimizer))
    best: list[Any] = []
    covered = 0
    for module in modules:
        if id(module) in children:
            continue
        held = len(wanted & set(_parameters(module)))
        if held and held >= covered:
            best = [module] if held > covered else [*best, module]
            covered = held
    return _in_common(best, wanted, covered) if len(best) > 1 else next(iter(best), None)


def _in_common(roots: list[Any], wanted: set[int], covered: int) -> Any:
    """Returns the outermost module in all of these roots that holds as many of the parameters, else the first root."""
    inner = set.intersection(*({id(module) for module in _modules(root)} for root in roots))
    shared = (module for module in _modules(roots[0]) if id(module) in inner)
    return next((module for module in shared if len(wanted & set(_parameters(module))) == covered), roots[0])


def _children(module: Any) -> list[Any]:
    # a module whose __init__ did not call super() has neither of the two dicts
    return [child for child in module.__dict__.get("_modules", {}).values() if child is not None]


def _parameters(module: Any) -> Iterator[int]:
    for each in _modules(module):
        yield from (id(p) for p in each.__dict__.get("_parameters", {}).values() if p is not None)


def _modules(module: Any) -> Iterator[Any]:
    """Yields the module and all modules in it, each before those that it holds."""
    seen, waiting = set(), deque([module])
    while waiting:
        current = waiting.popleft()
        if id(current) in seen:
            continue
        seen.add(id(current))
        yield current
        waiting.extend(_children(current))
