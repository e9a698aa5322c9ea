"""Groups the names of parameters into the layers of a heat map.

A model with at most 256 parameters has a row for each. A larger one has a row for each module, or group of modules at the
greatest depth that gives at most 256 rows. If that gives very few (all layers are in one long list), neighbors in the list
share a row, named after the first. The rows keep the order of the parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from perfagent.step.gradients import ParameterTable

__all__ = ["MOST_LAYERS", "Layers", "layers_of"]

MOST_LAYERS = 256
_FEWEST = 16
"""Fewest rows of a large model: with fewer, the heat map no longer shows where in the model something happens."""


class Layers(NamedTuple):
    """names: of the rows, in order. of: for each parameter, its row."""

    names: tuple[str, ...]
    of: list[int]


@lru_cache(maxsize=32)
def layers_of(table: ParameterTable) -> Layers:
    """Where ranks hold different parameters of one model, the rows are the same on all of them."""
    grouped = _grouped(table.names if table.among is None else table.among)
    if table.among is not None:
        row_of = dict(zip(table.among, grouped, strict=True))
        grouped = [row_of.get(name, name) for name in table.names]
    rows: dict[str, int] = {}
    of = [rows.setdefault(name, len(rows)) for name in grouped]
    return Layers(tuple(rows), of)


def _grouped(parameters: Sequence[str], most: int = MOST_LAYERS) -> list[str]:
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
