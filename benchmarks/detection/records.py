"""The recorded runs of tests/data, each as the moments that rules judge.

Loss curves are read as `perfagent diagnose` reads them. The other formats are converted here: MLPerf results (a row a
step: time, samples, seconds, loss) and the log points of bigscience's chronicles.
"""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from perfagent.wire import Event
from perfagent_client.history import find_runs
from perfagent_server.backtest.moment import Moment
from perfagent_server.diagnosis.moments import EPOCH, moments
from perfagent_server.rules.catalogue import all_rules
from perfagent_server.rules.plan import Plan

__all__ = [
    "DATA",
    "Record",
    "begin_at",
    "chosen_on",
    "curves",
    "family_of",
    "mlperf",
    "moments_of_rows",
    "rows_of_chronicles",
]

DATA = Path(__file__).resolve().parents[2] / "tests" / "data"
MLPERF = "MLPerf v3.0 GPT-3"
_GROWTH_STEPS = 2000
_SCALE_LEVEL = 16384.0
CHOSEN_ON_CURVES = frozenset(
    ("loss_spike", "loss_divergence", "loss_plateau", "frozen_training", "throughput_regression", "step_time_tail")
)
"""Rules whose thresholds were chosen with a look at the loss curves of every family. Those on gradients and learning
rates saw the only family that logs them."""


@dataclass(frozen=True, slots=True)
class Record:
    """A healthy run. family: of runs of one recipe."""

    name: str
    family: str
    moments: Sequence[Moment]

    @property
    def series(self) -> frozenset[str]:
        """What it logs; not every series in the first steps."""
        return frozenset(name for moment in self.moments[:20] for name in moment.values)


@cache
def curves() -> list[Record]:
    files = sorted((DATA / "loss_curves").glob("*.csv"))
    return [Record(path.stem, family_of(path.stem), _curve(path)) for path in files]


def _curve(path: Path) -> list[Moment]:
    return [
        moment for source in find_runs([path]) for run in source.read() for moment in moments(run, Plan(all_rules()))
    ]


def family_of(name: str) -> str:
    """`track_1_short__2024-11-08_CastBf16__a833bed8` is of the family `2024-11-08_CastBf16`."""
    return name.split("__")[1]


@cache
def scaled() -> list[Record]:
    """Some of the curves with a made-up GradScaler beside them, since none logs one: it starts at 65536, doubles every
    2000 steps, and halves above its level, which is 16384, and at one step of five thousand."""
    return [replace(one, moments=_with_scaler(one)) for one in curves()[:6]]


def _with_scaler(record: Record) -> list[Moment]:
    draw = random.Random(record.name)
    scale, skipped, since = 65536.0, 0.0, 0
    moments = []
    for moment in record.moments:
        overflows = scale > _SCALE_LEVEL or draw.random() < 0.0002
        scale, skipped, since = (scale / 2, skipped + 1, 0) if overflows else (scale, skipped, since + 1)
        if since == _GROWTH_STEPS:
            scale, since = 2 * scale, 0
        moments.append(replace(moment, values={**moment.values, "amp/scale": scale, "amp/skipped": skipped}))
    return moments


@cache
def mlperf() -> list[Record]:
    return [Record(path.stem, MLPERF, _mlperf(path)) for path in sorted((DATA / "mlperf").glob("*.csv"))]


def _mlperf(path: Path) -> list[Moment]:
    with path.open() as file:
        rows = list(csv.DictReader(file))
    return [
        Moment(float(row["time_ms"]) / 1000, step, {"loss": float(row["loss"]), "step_time_s": float(row["step_s"])})
        for step, row in enumerate(rows, 1)
    ]


def chosen_on(rule: str, family: str) -> bool:
    """Whether thresholds of a rule were chosen on runs of a family; if not, they only tested it."""
    if family == MLPERF:
        return False
    return rule in CHOSEN_ON_CURVES or rule in ("grad_norm_explosion", "lr_anomaly")


# ---- the chronicles


@cache
def rows_of_chronicles() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((DATA / "incidents" / "bigscience.json").read_text("utf-8"))
    return rows


def moments_of_rows(rows: Iterable[Mapping[str, Any]], *, begin: float = EPOCH) -> list[Moment]:
    """Log points, one after the other; what a row does not say is absent."""
    found, time = [], begin
    for row in rows:
        took = row["iter_s"] or (row["iter_ms"] or 0) / 1000
        values = {"loss": row["loss"], "grad/norm": row["grad_norm"], "amp/scale": row["loss_scale"], "lr": row["lr"]}
        time += took
        told = {name: float(value) for name, value in {**values, "step_time_s": took}.items() if value is not None}
        found.append(Moment(time, row["iteration"], told))
    return begin_at(found)


def begin_at(moments: Sequence[Moment]) -> list[Moment]:
    """The moments as a run that was started at the first of them."""
    first = moments[0]
    data = {"state": "running", "world_size": 1, "start_step": first.step if first.step > 1 else 0}
    begun = replace(first, events=(Event(kind="state", time=first.time, data=data),), attempt=1)
    return [begun, *(replace(moment, events=(), attempt=1) for moment in moments[1:])]
