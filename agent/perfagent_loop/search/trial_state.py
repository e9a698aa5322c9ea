"""Saves the state that trial steps change, and restores it after the search.

Modules and optimizers are saved when the step first uses them: torch's global hooks see each of them, wherever the step
function gets it from. Other objects with a state_dict(), such as schedulers, gradient scalers and averages of the
weights, are found by following the references of the step function: its closure, global variables, default arguments,
and the attributes of its object. Copies lie in host memory."""

from __future__ import annotations

import ctypes
import functools
import gc
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from perfagent.errors import ConfigError
from perfagent.step.state import unwatched
from perfagent_loop.collectives import world_of_job
from perfagent_loop.kinds import State
from perfagent_loop.randomness import cuda_in_use, random_state, restore_random_state

__all__ = ["SavedState", "release_memory", "restoring_state"]

_DEPTH = 3
"""How many references in a row are followed from the step function."""


class SavedState:
    """The state of every object that the step uses, as it was before the first trial."""

    def __init__(self) -> None:
        self._tensors: dict[int, tuple[Tensor, Tensor]] = {}
        self._gradients: dict[int, tuple[Tensor, Tensor | None]] = {}
        self._modes: dict[int, tuple[nn.Module, bool]] = {}
        self._optimizers: dict[int, tuple[torch.optim.Optimizer, dict[Tensor, State], list[State]]] = {}
        self._others: dict[int, tuple[Any, Any]] = {}
        self._random = random_state()

    def module(self, module: nn.Module) -> None:
        """A module with its submodules, parameters and buffers."""
        if id(module) in self._modes:
            return
        for part in module.modules():
            self._modes[id(part)] = (part, part.training)
        for parameter in module.parameters():
            self._parameter(parameter)
        for buffer in module.buffers():
            self._tensor(buffer)

    def optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer with its parameters and state."""
        if id(optimizer) in self._optimizers:
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self._parameter(parameter)
        state = {parameter: _copied(dict(values)) for parameter, values in optimizer.state.items()}
        groups = [_copied({k: v for k, v in group.items() if k != "params"}) for group in optimizer.param_groups]
        self._optimizers[id(optimizer)] = optimizer, state, groups

    def stateful(self, item: Any) -> None:
        """Any object with state_dict() and load_state_dict()."""
        if isinstance(item, nn.Module):
            self.module(item)
        elif isinstance(item, torch.optim.Optimizer):
            self.optimizer(item)
        elif id(item) not in self._others:
            self._others[id(item)] = (item, _copied(item.state_dict()))

    @torch.no_grad()
    def restore(self) -> None:
        """Restores everything in place: the tensors stay the same objects and get their old values."""
        for item, state in self._others.values():
            item.load_state_dict(state)
        for tensor, copy in self._tensors.values():
            tensor.copy_(copy)
        for parameter, gradient in self._gradients.values():
            if gradient is None:
                parameter.grad = None
            elif parameter.grad is None:
                parameter.grad = gradient.to(parameter.device)
            else:
                parameter.grad.copy_(gradient)
        for optimizer, of_parameters, groups in self._optimizers.values():
            for parameter in [one for one in optimizer.state if one not in of_parameters]:
                del optimizer.state[parameter]
            for parameter, values in of_parameters.items():
                _restore_values(optimizer.state[parameter], values)
            for group, values in zip(optimizer.param_groups, groups, strict=True):
                _restore_values(group, values)
        for module, training in self._modes.values():
            module.training = training
        restore_random_state(self._random)

    def _parameter(self, parameter: Tensor) -> None:
        if id(parameter) not in self._gradients:
            self._gradients[id(parameter)] = (parameter, None if parameter.grad is None else _copied(parameter.grad))
        self._tensor(parameter)

    def _tensor(self, tensor: Tensor) -> None:
        if id(tensor) not in self._tensors:
            self._tensors[id(tensor)] = (tensor, _copied(tensor))


@contextmanager
def restoring_state(step: object, also: Iterable[Any] = ()) -> Iterator[SavedState]:
    """Saves what the step uses inside of the block and restores it at the end, after an error too. also: further
    objects with state_dict() and load_state_dict(), which no reference of the step leads to."""
    saved = SavedState()
    for item in also:
        if not _has_state(item):
            raise ConfigError(f"restore takes what has state_dict() and load_state_dict(), not {type(item).__name__}")
        saved.stateful(item)
    for item in _reachable(step):
        saved.stateful(item)

    def before_forward(module: nn.Module, _inputs: object) -> None:
        communicates = isinstance(module, DistributedDataParallel) and module.require_backward_grad_sync
        if communicates and world_of_job() > 1:
            raise ConfigError("the step communicates (DistributedDataParallel): let it use model.module or no_sync()")
        saved.module(module)

    of_step = register_optimizer_step_pre_hook(lambda optimizer, _args, _kwargs: saved.optimizer(optimizer))
    handles = [register_module_forward_pre_hook(before_forward), of_step]
    try:
        with unwatched():
            yield saved
    finally:
        for handle in handles:
            handle.remove()
        saved.restore()
        release_memory()


def release_memory() -> None:
    """Collects reference cycles and returns the free blocks of the allocators, so that no fragments stay behind."""
    gc.collect()
    if cuda_in_use():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    if _trim is not None:
        _trim(0)


_trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
"""Of glibc alone."""


def _copied(value: Any) -> Any:
    """A copy in host memory."""
    if isinstance(value, Tensor):
        return value.detach().cpu().clone() if value.device.type == "cpu" else value.detach().cpu()
    if type(value) is dict:
        return {key: _copied(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copied(item) for item in value)
    return value


def _restore_values(now: State, before: State) -> None:
    """The old values, in the tensors that hold the new ones where the shapes agree."""
    for name in [name for name in now if name != "params" and name not in before]:
        del now[name]
    for name, value in before.items():
        held = now.get(name)
        if isinstance(value, Tensor) and isinstance(held, Tensor) and held.shape == value.shape:
            held.copy_(value)
        else:
            now[name] = value


def _reachable(step: object) -> Iterator[Any]:
    """Objects with state that references lead to from the step function, at most _DEPTH of them in a row."""
    seen: set[int] = set()
    level = [step]
    for _ in range(_DEPTH):
        found = {id(item): item for holder in level for item in _references(holder)}
        level = [item for key, item in found.items() if key not in seen]
        seen.update(found)
        yield from (item for item in level if _has_state(item))


def _has_state(item: object) -> bool:
    found = (getattr(item, name, None) for name in ("state_dict", "load_state_dict"))
    return not inspect.isclass(item) and all(map(callable, found))


def _references(item: Any) -> list[Any]:
    if isinstance(item, functools.partial):
        return [item.func, *item.args, *item.keywords.values()]
    if inspect.ismethod(item):
        return [item.__self__, item.__func__]
    if inspect.isfunction(item):
        return [] if (item.__module__ or "").startswith("torch.") else _references_of_function(item)
    if isinstance(item, (list, tuple)):
        return list(item[:100])
    if type(item) is dict:
        return list(item.values())[:100]
    if inspect.ismodule(item) or inspect.isclass(item) or isinstance(item, (nn.Module, torch.optim.Optimizer, Tensor)):
        return []
    return list(getattr(item, "__dict__", {}).values())


def _references_of_function(function: FunctionType) -> list[Any]:
    """The values of its free variables, of the global variables that it names, and of its default arguments.

    Not by inspect.getclosurevars, which raises ValueError where a free variable has no value yet."""
    found = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # empty: the variable is assigned after the search
            found.append(cell.cell_contents)
    names = function.__code__.co_names
    return found + [function.__globals__[name] for name in names if name in function.__globals__]
