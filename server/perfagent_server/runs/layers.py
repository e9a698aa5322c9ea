"""The series of a family, one for each layer of the model, as one matrix."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from perfagent_server.store.interface import MetricStore

__all__ = ["LayerMatrix", "layer_matrix"]

MOST_LAYERS = 256


@dataclass
class LayerMatrix:
    """`values[i][j]` is the mean of layers[i] in the bucket that begins at step[j]; NaN where there is none. layers: names
    within the family, in the order of the model; more: how many further ones were left out."""

    family: str
    layers: list[str]
    step: list[int]
    values: list[list[float]]
    more: int = 0


def layer_matrix(store: MetricStore, run: str, family: str, points: int) -> LayerMatrix:
    """At most `points` columns over the whole run."""
    prefix = f"{family}/"
    names = sorted((name for name in store.names(run) if name.startswith(prefix)), key=_in_model_order)
    shown = names[:MOST_LAYERS]
    if not shown:
        return LayerMatrix(family, [], [], [])
    found = store.newest(run, shown, steps=None, points=points)
    known = [name for name in shown if name in found]
    steps = (
        np.unique(np.concatenate([np.asarray(found[name].step) for name in known])) if known else np.empty(0, np.int64)
    )
    values = np.full((len(known), len(steps)), np.nan)
    for row, name in enumerate(known):
        values[row, np.searchsorted(steps, found[name].step)] = found[name].mean
    layers = [name.removeprefix(prefix) for name in known]
    return LayerMatrix(family, layers, steps.tolist(), values.tolist(), len(names) - len(shown))


def _in_model_order(name: str) -> list[tuple[int, int, str]]:
    """Numbers in a path as numbers: `layers.2` before `layers.10`."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", name)]
