"""Checks the arguments of `attach` and `init`, and words the error for anything else."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from perfagent.errors import ConfigError
from perfagent.libraries import unresolved

__all__ = ["as_dict", "as_tags", "check_arguments", "flat"]


def check_arguments(
    model: object, optimizer: object, start_step: object, stoppable: object, **texts: tuple[object, int]
) -> None:
    """texts: what was given (None: nothing), and how many characters it may have. Raises ConfigError."""
    nn = getattr(sys.modules.get("torch"), "nn", None)  # another thread may be importing torch
    if model is not None and not isinstance(model, getattr(nn, "Module", ())):
        raise ConfigError(f"attach() takes a torch.nn.Module (or no model at all), not {_shown(model)}")
    if optimizer is not None and not isinstance(getattr(optimizer, "param_groups", None), list):
        raise ConfigError(f"optimizer must be a torch.optim.Optimizer or left out, not {_shown(optimizer)}")
    if start_step is not None and (isinstance(start_step, bool) or not isinstance(start_step, int) or start_step < 0):
        raise ConfigError(
            f"start_step must be a whole number from 0 on (the first step to come), not {start_step!r:.80}"
        )
    if not isinstance(stoppable, bool):
        raise ConfigError(f"stoppable must be True or False, not {stoppable!r:.80}")
    for what, (text, most) in texts.items():
        if text is not None and (not isinstance(text, str) or not text.strip() or len(text) > most):
            raise ConfigError(f"{what} must be text of 1 to {most} characters, not {text!r:.80}")


def as_dict(config: object) -> dict[str, Any]:
    if config is None:
        return {}
    config = unresolved(config)
    if isinstance(config, Mapping):
        return {str(key): value for key, value in config.items()}
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    if isinstance(config, argparse.Namespace) or type(config).__name__ == "SimpleNamespace":
        return dict(vars(config))
    raise ConfigError(f"config must be a dict, a dataclass or a namespace, not {_shown(config)}")


def flat(values: dict[str, Any], depth: int = 8) -> dict[str, Any]:
    """A dict among the values becomes its entries, with a dot in their names, as in W&B. depth: of dicts in dicts; what
    lies deeper stays."""
    if not depth or not any(isinstance(value, dict) for value in values.values()):
        return values
    found: dict[str, Any] = {}
    for name, value in values.items():
        group = {f"{name}.{inner}": more for inner, more in value.items()} if isinstance(value, dict) else None
        found |= {name: value} if group is None else flat(group, depth - 1)
    return found


def as_tags(tags: Any) -> list[str]:
    labels = [tags] if isinstance(tags, str) else list(tags) if isinstance(tags, Iterable) else [tags]
    wrong = [tag for tag in labels if not isinstance(tag, str) or not tag]
    if wrong:
        raise ConfigError(f"tags must be texts, not {wrong[0]!r:.80}")
    return labels


def _shown(value: object) -> str:
    """A value in one line: an optimizer's or model's own text has many, and begins with its type."""
    kind, text = type(value).__name__, " ".join(repr(value).split())
    return f"{text:.80}" if text.startswith(kind) else f"{kind} {text:.80}"
