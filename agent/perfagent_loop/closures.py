"""Refuses optimizers and schedulers whose step() cannot be called without more: LBFGS, which computes the loss again
within its step.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch.optim.optimizer import Optimizer

from perfagent.errors import ConfigError

__all__ = ["check_optimizer_step", "wanted_by", "wanted_by_step"]


def check_optimizer_step(optimizer: Optimizer, instead: str) -> None:
    """Raises ConfigError for an optimizer that computes the loss itself, several times a step. instead: what is to be
    done."""
    wanted = wanted_by_step(optimizer)
    if wanted:
        raise ConfigError(
            f"the step() of {type(optimizer).__name__} wants {wanted}, to compute the loss again within the step; {instead}"
        )


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
