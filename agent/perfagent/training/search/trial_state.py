"""Notes whatever a trial step changes before it changes, and puts it back afterwards.

Modules and optimizers are noticed as they are used, by torch's global hooks, which hear of every one of them wherever the step
function has it from. What has a state_dict() and is reachable from the step function (a scheduler, a gradient scaler, an average
of the weights) is found by looking at what the function refers to. Copies lie in host memory, so that they take nothing away
from what is being measured.
"""

from __future__ import annotations

import functools
import gc
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from perfagent.errors import ConfigError
from perfagent.training.randomness import random_state, restore_random_state
from perfagent.training.suspend import unwatched

__all__ = ["Kept", "kept", "release_memory"]

_DEEP = 3
"""So many functions or objects are followed from the step function."""


class Kept:
    """The state of everything that was met, from before it was first used."""

    def __init__(self) -> None:
        self._tensors: dict[int, tuple[Tensor, Tensor]] = {}
        self._gradients: dict[int, tuple[Tensor, Tensor | None]] = {}
        self._modes: dict[int, tuple[nn.Module, bool]] = {}
        self._optimizers: dict[int, tuple[torch.optim.Optimizer, dict[str, Any]]] = {}
        self._others: dict[int, tuple[Any, Any]] = {}
        self._random = random_state()

    def module(self, module: nn.Module) -> None:
        """A module with all that is below it."""
        if id(module) in self._modes:
            return
        for one in module.modules():
            self._modes[id(one)] = (one, one.training)
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
        state = {parameter: {name: _copied(value) for name, value in of.items()} for parameter, of in optimizer.state.items()}
        groups = [{name: _copied(value) for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
        self._optimizers[id(optimizer)] = (optimizer, {"state": state, "groups": groups})

    def other(self, thing: Any) -> None:
        """Something with state_dict() and load_state_dict()."""
        if isinstance(thing, nn.Module):
            self.module(thing)
        elif isinstance(thing, torch.optim.Optimizer):
            self.optimizer(thing)
        elif id(thing) not in self._others:
            self._others[id(thing)] = (thing, _copied(thing.state_dict()))

    @torch.no_grad()
    def restore(self) -> None:
        """Puts everything back, in place: the same tensors as before hold what they held before."""
        for thing, state in self._others.values():
            thing.load_state_dict(state)
        for tensor, copy in self._tensors.values():
            tensor.copy_(copy)
        for parameter, gradient in self._gradients.values():
            if gradient is None:
                parameter.grad = None
            elif parameter.grad is None:
                parameter.grad = gradient.to(parameter.device)
            else:
                parameter.grad.copy_(gradient)
        for optimizer, before in self._optimizers.values():
            _restore_optimizer(optimizer, before)
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
def kept(step: Any, also: Iterable[Any] = ()) -> Iterator[Kept]:
    """Within, whatever a step uses is noted; at the end, after an error too, it is put back. also: objects with a state_dict that
    nothing leads to. The run that is being recorded hears of none of it."""
    keeper = Kept()
    for thing in also:
        if not (callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))):
            raise ConfigError(f"what is restored must have state_dict() and load_state_dict(); a {type(thing).__name__} has not")
        keeper.other(thing)
    for thing in _reachable(step):
        keeper.other(thing)

    def before_forward(module: nn.Module, _inputs: Any) -> None:
        _refuse_communication(module)
        keeper.module(module)

    def before_step(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        keeper.optimizer(optimizer)

    handles = [register_module_forward_pre_hook(before_forward), register_optimizer_step_pre_hook(before_step)]
    try:
        with unwatched():
            yield keeper
    finally:
        for handle in handles:
            handle.remove()
        keeper.restore()
        release_memory()


def release_memory() -> None:
    """Frees what is held in cycles, and gives the allocators' free blocks back: nothing is left in small pieces."""
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    _trim()


@functools.cache
def _trimmer() -> Callable[[int], int] | None:
    import ctypes

    try:
        trim: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError):  # not glibc
        return None
    return trim


def _trim() -> None:
    trim = _trimmer()
    if trim is not None:
        trim(0)


def _refuse_communication(module: nn.Module) -> None:
    if (
        isinstance(module, DistributedDataParallel)
        and module.require_backward_grad_sync
        and dist.is_initialized()
        and dist.get_world_size() > 1
    ):
        raise ConfigError(
            "the step communicates (DistributedDataParallel): ranks would wait for ever for one that ran out of memory; "
            "let the step use model.module, or run inside model.no_sync()"
        )


def _copied(value: Any) -> Any:
    """A copy that lies in host memory."""
    if isinstance(value, Tensor):
        return value.detach().cpu().clone() if value.device.type == "cpu" else value.detach().cpu()
    if type(value) is dict:
        return {key: _copied(one) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copied(one) for one in value)
    return value


def _restore_optimizer(optimizer: torch.optim.Optimizer, before: dict[str, Any]) -> None:
    for parameter in list(optimizer.state):
        if parameter not in before["state"]:
            del optimizer.state[parameter]
    for parameter, saved in before["state"].items():
        state = optimizer.state[parameter]
        for name in [name for name in state if name not in saved]:
            del state[name]
        for name, value in saved.items():
            state[name] = _back(state.get(name), value)
    for group, saved in zip(optimizer.param_groups, before["groups"], strict=True):
        for name in [name for name in group if name != "params" and name not in saved]:
            del group[name]
        for name, value in saved.items():
            group[name] = _back(group.get(name), value)


def _back(now: Any, before: Any) -> Any:
    """Into the same tensor where there is one of that shape."""
    if isinstance(before, Tensor) and isinstance(now, Tensor) and now.shape == before.shape:
        now.copy_(before)
        return now
    return before


def _reachable(step: Any) -> Iterator[Any]:
    """What has state and is referred to by a function: through its closure, its globals, its object, its defaults."""
    seen: set[int] = set()
    level = [step]
    for _ in range(_DEEP):
        found = {id(one): one for thing in level for one in _references(thing)}
        level = [one for key, one in found.items() if key not in seen]
        seen.update(found)
        yield from (one for one in level if _has_state(one))


def _has_state(thing: Any) -> bool:
    return not inspect.isclass(thing) and all(callable(getattr(thing, name, None)) for name in ("state_dict", "load_state_dict"))


def _references(thing: Any) -> list[Any]:
    if isinstance(thing, functools.partial):
        return [thing.func, *thing.args, *thing.keywords.values()]
    if inspect.ismethod(thing):
        return [thing.__self__, thing.__func__]
    if inspect.isfunction(thing):
        if thing.__module__.startswith("torch."):
            return []
        found = inspect.getclosurevars(thing)
        return [*found.nonlocals.values(), *found.globals.values(), *(thing.__defaults__ or ())]
    if isinstance(thing, (list, tuple)):
        return list(thing[:100])
    if isinstance(thing, Mapping) and type(thing) is dict:
        return list(thing.values())[:100]
    if inspect.ismodule(thing) or inspect.isclass(thing) or isinstance(thing, (nn.Module, torch.optim.Optimizer, Tensor)):
        return []
    return list(getattr(thing, "__dict__", {}).values())
