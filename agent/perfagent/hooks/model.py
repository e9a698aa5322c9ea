"""Which model an optimizer trains, and which other optimizers there are, found without being told.

One look at the living objects (100 ms at 170,000 of them), once, after the first step, and only where `attach(model)` did not
say. Only weak references are kept.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

from perfagent.hooks.living import living
from perfagent.signals.made_of import numbers_in

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
    """The root module that holds most of the optimizer's parameters; None when none does."""
    children = {id(child) for module in modules for child in _children(module)}
    wanted = set(parameters_of(optimizer))
    best, covered = None, 0
    for module in modules:
        if id(module) in children:
            continue
        held = len(wanted & set(_parameters(module)))
        if held > covered:
            best, covered = module, held
    return best


def _children(module: Any) -> list[Any]:
    # a module whose __init__ did not call super() has neither of the two dicts
    return [child for child in module.__dict__.get("_modules", {}).values() if child is not None]


def _parameters(module: Any) -> Iterator[int]:
    seen, waiting = set(), [module]
    while waiting:
        current = waiting.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        yield from (id(p) for p in current.__dict__.get("_parameters", {}).values() if p is not None)
        waiting.extend(_children(current))
