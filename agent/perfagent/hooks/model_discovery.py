"""Which model an optimizer trains, and which other optimizers there are, found without being told.

One look at the living objects (100 ms at 170,000 of them), once, after the first step, and only where `attach(model)` did not
say. Only weak references are kept.
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
    """The optimizer's parameters by identity."""
    return {id(p): p for group in optimizer.param_groups for p in group["params"]}


def owned(optimizer: Any) -> int:
    """How many numbers an optimizer trains."""
    return sum(map(numbers_in, parameters_of(optimizer).values()))


def search(*, models: bool) -> tuple[list[Any], list[Any]]:
    """The modules (models: False leaves them out) and the optimizers of the process. Objects that `gc.freeze()` hid are not
    found."""
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
    """Whether the process has any of torch's optimizers; slow (living.py)."""
    return any("param_groups" in thing.__dict__ for thing in living(sys.modules["torch"].optim.Optimizer))


def root_of(optimizer: Any, modules: Sequence[Any]) -> Any:
    """The root module that holds most of the optimizer's parameters; None when none does. Where several hold as many, as losses
    that share a model do, it is what they have in common."""
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
    """The outermost module in all of these roots that holds as many of the parameters; the first root where there is none."""
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
    """It and all in it, each before what it holds."""
    seen, waiting = set(), deque([module])
    while waiting:
        current = waiting.popleft()
        if id(current) in seen:
            continue
        seen.add(id(current))
        yield current
        waiting.extend(_children(current))
