"""Names an optimizer's parameters as the model does, without what wrappers added to their paths."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from perfagent.libraries import WRAPPERS

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim import Optimizer

__all__ = ["module_names", "names_in", "names_of", "without_wrappers"]

_MOST_BYTES = 200
"""Longest name: with the group before it, it fits into a metric name."""
_WRAPPERS = frozenset(("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", *WRAPPERS))
"""Parts that torch.compile, FSDP, activation checkpointing and other libraries add to a parameter's path."""


def names_of(optimizer: Optimizer, model: nn.Module | None) -> list[str]:
    """Returns a name for each parameter of an optimizer, in its order: the model's name, or `group0.3` if neither model
    nor optimizer has one."""
    known = {} if model is None else _named(model)
    names = []
    for number, group in enumerate(optimizer.param_groups):
        given, size = group.get("param_names"), len(group["params"])
        if isinstance(given, list) and len(given) == size:
            own = without_wrappers(map(str, given))
        else:
            own = [f"group{number}.{place}" for place in range(size)]
        names += [known.get(id(parameter), name) for parameter, name in zip(group["params"], own, strict=True)]
    return names


def names_in(model: nn.Module, parameters: Sequence[torch.Tensor]) -> tuple[list[str], list[str]]:
    """Returns a name for each of these parameters of a model, and all of the model's names."""
    known = _named(model)
    names = [known.get(id(parameter), f"parameter{place}") for place, parameter in enumerate(parameters)]
    return names, [*known.values()]


def _named(model: nn.Module) -> dict[int, str]:
    named = list(model.named_parameters())
    return dict(zip([id(p) for _, p in named], without_wrappers(name for name, _ in named), strict=True))


def module_names(model: nn.Module) -> dict[nn.Module, str]:
    """Returns the names of a model's modules: "" for itself, and for what it wraps."""
    named = dict(model.named_modules())
    return dict(zip(named.values(), without_wrappers(named), strict=True))


def without_wrappers(names: Iterable[str]) -> list[str]:
    """Removes from paths of parameters or modules the parts that wrappers added."""
    paths = [[part for part in name.split(".") if part and part not in _WRAPPERS] for name in names]
    if all(path[0] == "module" for path in paths if path):  # DistributedDataParallel, DataParallel, DeepSpeed
        paths = [path[1:] for path in paths]
    return [_short(".".join(path)) for path in paths]


def _short(name: str) -> str:
    """A name that is too long becomes its checksum and its end, of characters of up to four bytes."""
    whole = name.encode("utf-8", "replace")
    return name if len(whole) <= _MOST_BYTES else f"{zlib.crc32(whole):08x}_{name[-_MOST_BYTES // 4 + 3 :]}"
