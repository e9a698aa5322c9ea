"""The layers of a family whose values are measured now and then: the newest of each."""

from __future__ import annotations

import math
from typing import NamedTuple

from perfagent_server.rules.window import Window

__all__ = ["LayerRow", "layer_rows"]


class LayerRow(NamedTuple):
    """A layer's newest values and their steps, oldest first; at least one."""

    layer: str
    steps: list[int]
    values: list[float]


def layer_rows(window: Window, prefix: str, after: int) -> list[LayerRow]:
    """The layers of which values are kept that were measured after that step. A layer need not be in every measurement:
    an activation is reported when enough rows of it were seen."""
    family = window.by_family.get(prefix)
    if family is None:
        return []
    names, steps, values = family.matrix()
    later = [place for place, step in enumerate(steps) if step > after]
    rows = []
    for name, row in zip(names, values.tolist(), strict=True):
        places = [place for place in later if not math.isnan(row[place])]
        if places:
            rows.append(LayerRow(name.removeprefix(prefix), [steps[at] for at in places], [row[at] for at in places]))
    return rows
