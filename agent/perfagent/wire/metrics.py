"""The catalogue of metric names: what each means, its unit, which direction is better, and how ranks are put together.

One metric is one row of metrics.json, one field on the wire and one chart; the same name stands in all three. Names that a user
logs are not in the catalogue: `metric()` then answers with a mean over ranks and no unit.

A family has a row for the group of its names: `grad_norm/` followed by a layer, which is the path of a parameter or
module as in the model (`grad_norm/encoder.3.weight`). Of `grad_norm/` and `update_ratio/` a run has at most 256 layers
each, of `dead_share/` and `grad_nonfinite/` at most 64; together far below the number of names that a run may have.
What a family says of layers, a series says of the whole: `grad/norm`, `update/ratio`, `dead/share`, `grad/nonfinite`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from msgspec import Struct, json
from msgspec.structs import replace

__all__ = ["CATALOGUE", "FAMILIES", "PHASES", "TIMED_PHASES", "Metric", "metric", "parts_of", "whole_of"]

OverRanks = Literal["mean", "sum", "max", "min"]
Better = Literal["higher", "lower", "neither"]
_BY_SCRIPT = "logged by the training script"


class Metric(Struct, frozen=True):
    """name: as on the wire; title: as on a chart; unit: "" when there is none; over_ranks: how ranks become one value.

    root_of: the series in which ranks send their parts where none of them knows the value (sharded gradients): it is
    then the square root of the sum of the parts of all ranks.
    """

    name: str
    title: str
    unit: str = ""
    meaning: str = ""
    better: Better = "neither"
    over_ranks: OverRanks = "mean"
    root_of: str = ""

    @property
    def is_logged(self) -> bool:
        """By the script: it is not in the catalogue."""
        return self.meaning == _BY_SCRIPT


PHASES = ("data", "h2d", "forward", "backward", "optimizer", "comm", "checkpoint", "eval", "other")
TIMED_PHASES = (*PHASES, "compile", "rollout")
"""PHASES, `compile` and `rollout`. The last two are not drawn in the chart of the step."""

_ROWS = json.decode(Path(__file__).with_suffix(".json").read_bytes())
CATALOGUE = {row[0]: Metric(*row) for row in _ROWS["metrics"]}
FAMILIES = {row[0]: Metric(*row) for row in _ROWS["families"]}
_WHOLES = {row.root_of: row.name for row in (*CATALOGUE.values(), *FAMILIES.values()) if row.root_of}


def metric(name: str) -> Metric:
    """The catalogue's row for a name; a node's other GPUs (`node_gpu3/power_w`) read like the rank's own."""
    row = CATALOGUE.get(name)
    if row is not None:
        return row
    own = CATALOGUE.get(re.sub(r"node_gpu\d+/", "gpu/", name)) if name.startswith("node_gpu") else None
    group, slash, layer = name.partition("/")
    if own is not None:
        return replace(own, name=name, title=f"{own.title} ({group})")
    family = FAMILIES.get(group + slash)
    if family is not None and layer:
        parts = family.root_of + layer if family.root_of else ""
        return replace(family, name=name, title=f"{family.title}: {layer}", root_of=parts)
    return Metric(name, name, "", _BY_SCRIPT)


def parts_of(name: str) -> str:
    """The series in which ranks send their parts of `name` where none of them knows it; "" for most names."""
    row = CATALOGUE.get(name)
    return row.root_of if row is not None else metric(name).root_of if name.startswith("grad_norm/") else ""


def whole_of(name: str) -> str:
    """The series of which a rank's `name` is a part: the root of the sum over all ranks. "" for most names."""
    whole = _WHOLES.get(name)
    if whole is not None:
        return whole
    group, slash, layer = name.partition("/")
    family = _WHOLES.get(group + slash)
    return family + layer if family is not None and layer else ""
