"""The optimizer of a simulation: the user's own, copied; a function of parameters; or torch's by its name."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from perfagent.errors import ConfigError
from perfagent_loop.checks import check_optimizer_step
from perfagent_loop.meta_copy import Twin

__all__ = ["AdamW8bit", "optimizer_for"]


def optimizer_for(given: Any, parameters: list[nn.Parameter], twin: Twin, *, fresh: bool) -> torch.optim.Optimizer:
    """An optimizer over copied parameters. fresh: the parameters are others than the user's (adapters): only kind and
    options of an optimizer are taken over. Raises ConfigError for one that computes the loss itself."""
    found = _optimizer(given, parameters, twin, fresh=fresh)
    check_optimizer_step(
        found,
        "what that takes is not estimated: estimate with optimizer='sgd' and add its history (LBFGS: 2 x history_size weights)",
    )
    return found


def _optimizer(given: Any, parameters: list[nn.Parameter], twin: Twin, *, fresh: bool) -> torch.optim.Optimizer:
    if isinstance(given, torch.optim.Optimizer):
        if not fresh:
            return twin.optimizer(given)
        accepted = inspect.signature(type(given)).parameters
        options = {name: value for name, value in given.defaults.items() if name in accepted}
        return _made(type(given), parameters, options)
    if isinstance(given, str):
        return _made(_named(given), parameters, {})
    if callable(given):
        return _made(given, parameters, {})
    raise ConfigError(
        f"optimizer must be a torch optimizer, a class or function of parameters, or a name such as 'adamw', not {given!r:.60}"
    )


def _made(make: Any, parameters: list[nn.Parameter], options: dict[str, Any]) -> torch.optim.Optimizer:
    made = make(parameters, **options)
    if not isinstance(made, torch.optim.Optimizer):
        raise ConfigError(f"{make!r:.60} gave a {type(made).__name__}; it must give a torch.optim.Optimizer")
    return made


def _named(name: str) -> Any:
    if name.lower() == "adamw8bit":
        return AdamW8bit
    if name.lower() == "momentum":
        return lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    known = {
        one.lower(): value
        for one, value in vars(torch.optim).items()
        if inspect.isclass(value) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer
    }
    if name.lower() not in known:
        raise ConfigError(f"no optimizer is called {name!r:.60}; known are adamw8bit, momentum, {', '.join(known)}")
    return known[name.lower()]


class AdamW8bit(torch.optim.Optimizer):
    """Occupies what AdamW with 8-bit moments does (Dettmers et al., 2022): two bytes a parameter and a float32 scale
    for each block of 256 and moment; in float32 where a tensor has less than 4096 numbers. It computes nothing."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002 - torch's signature
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and not self.state[parameter]:
                    self.state[parameter] = _moments(parameter)


def _moments(parameter: Tensor) -> dict[str, Tensor]:
    small = parameter.numel() < 4096
    dtype = torch.float32 if small else torch.uint8
    state = {name: torch.zeros_like(parameter, dtype=dtype) for name in ("state1", "state2")}
    if not small:
        blocks = -(-parameter.numel() // 256)
        state |= {name: torch.zeros(blocks, device=parameter.device) for name in ("absmax1", "absmax2")}
    return state
