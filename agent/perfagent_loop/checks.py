"""Checks of arguments that many functions share: each raises ConfigError with what was given and what is allowed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from perfagent.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["check_choice", "check_count", "check_module", "device_named"]


def check_count(name: str, given: object, of: str = "a whole number", *, least: int = 1, or_none: bool = False) -> None:
    """given: an int from `least` on. of: what it counts, such as "a number of samples"."""
    if not (or_none and given is None) and (type(given) is not int or given < least):
        none = " or None" if or_none else ""
        raise ConfigError(f"{name} must be {of}, {least} or more{none}, not {given!r:.80}")


def check_choice(name: str, given: object, allowed: Iterable[str], *, or_none: bool = False) -> None:
    """given: one of these words."""
    allowed = [*allowed]
    if not (or_none and given is None) and given not in allowed:
        raise ConfigError(
            f"{name} must be one of {', '.join(allowed)}{' or None' if or_none else ''}, not {given!r:.80}"
        )


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
        raise ConfigError(
            f"device must be one of torch's, such as 'cuda', 'cuda:1' or 'cpu', not {given!r:.80}"
        ) from error
