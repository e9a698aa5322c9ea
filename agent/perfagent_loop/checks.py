"""Checks of arguments that many functions share: each raises ConfigError with what was given and what is allowed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from perfagent.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim.optimizer import Optimizer

__all__ = [
    "check_choice", "check_count", "check_module", "check_optimizer_step", "device_named", "wanted_by", "wanted_by_step",
]  # fmt: skip


def check_count(name: str, given: object, of: str = "a whole number", *, least: int = 1, or_none: bool = False) -> None:
    """given: an int from `least` on. of: what it counts, such as "a number of samples"."""
    if not (or_none and given is None) and (type(given) is not int or given < least):
        none = " or None" if or_none else ""
        raise ConfigError(f"{name} must be {of}, {least} or more{none}, not {given!r:.80}")


def check_choice(name: str, given: object, allowed: Iterable[str], *, or_none: bool = False) -> None:
    """given: one of these words."""
    allowed = [*allowed]
    if not (or_none and given is None) and given not in allowed:
        none = " or None" if or_none else ""
        raise ConfigError(f"{name} must be one of {', '.join(allowed)}{none}, not {given!r:.80}")


def check_module(model: object) -> nn.Module:
    """The model, which must be a torch module."""
    from torch.nn import Module

    if not isinstance(model, Module):
        raise ConfigError(f"model must be a torch module (torch.nn.Module), not {type(model).__name__}")
    return model


def device_named(given: object) -> torch.device:
    """A device as torch names it."""
    import torch

    try:
        return torch.device(given)  # type: ignore[call-overload,no-any-return]
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device must be one of torch's, such as 'cuda:1' or 'cpu', not {given!r:.80}") from error


def check_optimizer_step(optimizer: Optimizer, instead: str) -> None:
    """Raises ConfigError for an optimizer that computes the loss itself. instead: what to do."""
    wanted = wanted_by_step(optimizer)
    if wanted:
        raise ConfigError(f"the step() of {type(optimizer).__name__} wants {wanted}, to compute the loss; {instead}")


def wanted_by_step(stepped: Any) -> str:
    """The first argument without which its step() cannot be called; empty where there is none."""
    # some schedulers put a function over that of the optimizer's object
    by_class = getattr(type(stepped), "step", None)
    return wanted_by(stepped.step) if by_class is None else wanted_by(by_class, stepped)


def wanted_by(function: Callable[..., object], *given: object) -> str:
    """The first argument that a function wants beside those that are given; empty where there is none."""
    try:
        inspect.signature(function).bind(*given)
    except TypeError as error:
        return str(error).partition("argument: ")[2] or "arguments"
    except ValueError:  # of C code, which does not say
        pass
    return ""
