"""Names an optimizer's parameters, and groups them into the layers of a heat map.

A model with at most 256 parameters has a row for each. A larger model has a row for each module, or for each group of
modules at the greatest depth that gives at most 256 rows. If that gives very few rows (all layers are in one long
list), neighbors in the list share a row, named after the first. The rows keep the order of the parameters, which is
that of the forward pass in nearly every model. Nothing here holds a parameter: names and indices only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["MOST_LAYERS", "Layers", "names_in", "names_of"]

MOST_LAYERS = 256
_FEWEST = 16
"""Fewest rows of a large model: with fewer, the heat map no longer shows where in the model something happens."""
_MOST_BYTES = 200
"""Longest name of a layer: with the group before it, it fits into a metric name."""
_WRAPPERS = frozenset(("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module"))
"""Parts that torch.compile, FSDP, activation checkpointing and Lightning add to a parameter's path."""


class Layers:
    """names: of the rows, in order. of: for each parameter, its row. among: all names of the model, if these parameters
    are only a part and other ranks hold the rest: the rows are then the same on all ranks."""

    __slots__ = ("names", "of")

    def __init__(
        self, parameters: Sequence[str], most: int = MOST_LAYERS, *, among: Sequence[str] | None = None
    ) -> None:
        grouped = _grouped(parameters if among is None else among, most)
        if among is not None:
            row_of = dict(zip(among, grouped, strict=True))
            grouped = [row_of.get(name, name) for name in parameters]
        rows: dict[str, int] = {}
        self.of = [rows.setdefault(name, len(rows)) for name in grouped]
        self.names = tuple(rows)


def _grouped(parameters: Sequence[str], most: int) -> list[str]:
    """Returns for each parameter the name of its row."""
    if len(set(parameters)) <= most:
        return list(parameters)
    paths = [name.split(".") for name in parameters]
    modules = [path[:-1] or path for path in paths]
    finer: Sequence[str] = parameters
    for depth in range(max(map(len, modules)), -1, -1):
        cut = [".".join(path[:depth]) for path in modules]
        if len(set(cut)) <= most:
            break
        finer = cut
    return cut if len(set(cut)) >= _FEWEST else _neighbors(cut, finer, most)


def _neighbors(groups: Sequence[str], finer: Sequence[str], most: int) -> list[str]:
    """Groups between two depths, of which one gives too few rows and the other too many: joins as many neighbors within
    each group as needed."""
    members: dict[str, dict[str, None]] = {}
    for group, name in zip(groups, finer, strict=True):
        members.setdefault(group, {})[name] = None
    sizes = [len(names) for names in members.values()]
    each = -(-sum(sizes) // most)
    while sum(-(-size // each) for size in sizes) > most:
        each += 1
    row_of = {}
    for group, names in members.items():
        listed = [*names]
        row_of.update({(group, name): listed[place // each * each] for place, name in enumerate(listed)})
    return [row_of[key] for key in zip(groups, finer, strict=True)]


def names_of(optimizer: Any, model: Any) -> list[str]:
    """Returns a name for each parameter of an optimizer, in its order: the model's name, or `group0.3` if neither model
    nor optimizer has one."""
    known = {} if model is None else _named(model)
    names = []
    for number, group in enumerate(optimizer.param_groups):
        told = group.get("param_names")
        named = isinstance(told, list) and len(told) == len(group["params"])
        told = (
            _cleaned(list(map(str, told)))
            if named
            else [f"group{number}.{place}" for place in range(len(group["params"]))]
        )
        names += [known.get(id(parameter), name) for parameter, name in zip(group["params"], told, strict=True)]
    return names


def names_in(model: Any, parameters: Sequence[Any]) -> tuple[list[str], list[str]]:
    """Returns a name for each of these parameters of a model, and all of the model's names."""
    known = _named(model)
    return [known.get(id(parameter), f"parameter{place}") for place, parameter in enumerate(parameters)], [
        *known.values()
    ]


def _named(model: Any) -> dict[int, str]:
    named = list(model.named_parameters())
    return dict(zip([id(p) for _, p in named], _cleaned([name for name, _ in named]), strict=True))


def _cleaned(names: Sequence[str]) -> list[str]:
    """Removes from paths of parameters the parts that wrappers added."""
    paths = [[part for part in name.split(".") if part not in _WRAPPERS] for name in names]
    if all(len(path) > 1 and path[0] == "module" for path in paths):  # DistributedDataParallel, DataParallel, DeepSpeed
        paths = [path[1:] for path in paths]
    return [_short(".".join(path) or name) for path, name in zip(paths, names, strict=True)]


def _short(name: str) -> str:
    return name if len(name.encode("utf-8", "replace")) <= _MOST_BYTES else name[-_MOST_BYTES // 4 :]
