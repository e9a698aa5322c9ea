"""Every row of docs/evidence/compatibility.md, trained for real: without the agent, with it, and each cell compared with the
truth."""

from __future__ import annotations

import json
import math
from importlib.metadata import version

import pytest
from agent.frameworks.matrix import COLUMNS, REASONS, ROWS, Row
from agent.frameworks.training import is_everyday, trained
from agent_recorded import Recorded, recorded

NODE = "host/memory_used_bytes"
PHASES = ("data", "forward", "backward", "optimizer")


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, id=row.id, marks=pytest.mark.real if is_everyday(row) else pytest.mark.long) for row in ROWS],
)
def test_training_is_captured_and_unchanged(row: Row) -> None:
    if not row.exists_in(version("torch")):
        pytest.skip(f"from torch {'.'.join(map(str, row.since))} on")
    told, record = trained(row)
    sources = recorded(record)
    assert [source.rank for source in sources] == list(range(row.ranks))
    for column in COLUMNS:
        if column in row.absent:
            assert_absent(column, sources)
    for rank, (truth, source) in enumerate(zip(told, sources, strict=True)):
        assert json.dumps(truth["watched"]) == json.dumps(truth["alone"]), (
            f"rank {rank}: the agent changed what training produces"
        )
        assert_captured(row, truth["watched"]["steps"], source)
        assert_adds_up(source)
    if "grad/norm" not in row.absent:
        assert_norms(row, told[0]["watched"]["steps"], sources)
    assert [source.states[-1]["state"] for source in sources] == ["finished"] * row.ranks
    assert sources[0].run is not None
    assert {(source.run, source.attempt) for source in sources} == {(sources[0].run, sources[0].attempt)}
    assert [NODE in source.series for source in sources] == [True] + [False] * (row.ranks - 1)


def assert_absent(column: str, sources: list[Recorded]) -> None:
    names = {"amp": ("amp/scale", "amp/skipped"), "grad/norm": ("grad/local_square_sum",)}.get(column, (column,))
    for source in sources:
        assert not [name for name in names if name in source.series], f"{column} is reported although there is none"
    if column == "one run":
        assert len(sources) == 1


def assert_captured(row: Row, steps: list[dict[str, float]], source: Recorded) -> None:
    """One rank: everything but the norm."""
    numbers = list(range(1, len(steps) + 1))
    series = source.series
    assert sorted(series["loss"]) == numbers
    for number, truth in zip(numbers, steps, strict=True):
        assert series["loss"][number] == pytest.approx(truth["loss"], rel=1e-6, nan_ok=True), f"step {number}"
        if "lr" not in row.absent:
            assert series["lr"][number] == truth["lr"]
        if "amp" not in row.absent:
            assert (series["amp/scale"][number], series["amp/skipped"][number]) == (truth["scale"], truth["skipped"])
        if number == 1 or "samples_per_s" in row.absent:
            continue  # the first step has no beginning
        taken = series["step_time_s"][number]
        for unit in ("samples", "tokens"):
            name = f"{unit}_per_s"
            if name not in row.absent:
                assert series[name][number] * taken == pytest.approx(truth[unit], rel=1e-9), f"{unit} of step {number}"
        phases = {phase: series[f"phase/{phase}_s"][number] for phase in PHASES if f"phase/{phase}_s" not in row.absent}
        assert all(spent > 0 for spent in phases.values()), phases
        assert sum(phases.values()) <= taken * (1 + 1e-6), f"the phases of step {number} are longer than it is"


def assert_adds_up(source: Recorded) -> None:
    """Nothing of a step is counted twice, and nothing is missing: all of its phases, communication and what a script named
    among them, are together as long as the step."""
    for step, seconds in source.times.items():
        phases = {name: spent for name, spent in seconds.items() if name != "step_time_s"}
        if "phase/forward_s" in phases:  # else it is not known what is left of the step
            assert min(phases.values()) >= 0, f"step {step}: {phases}"
            assert sum(phases.values()) == pytest.approx(seconds["step_time_s"], rel=0.05), f"step {step}: {phases}"


def assert_norms(row: Row, steps: list[dict[str, float]], sources: list[Recorded]) -> None:
    """The norm of the whole job, put together as the server does it."""
    name = "grad/local_square_sum" if row.sharded else "grad/norm"
    measured = [{step for step in source.series.get(name, {}) if step <= len(steps)} for source in sources]
    expected = {number for number, truth in enumerate(steps, start=1) if "norm" in truth and number >= row.norm_from}
    assert measured == [expected] * len(sources), "not every step, or a step that was skipped"
    for number in expected:
        parts = [source.series[name][number] for source in sources]
        norm = math.sqrt(math.fsum(parts)) if row.sharded else parts[0]
        assert norm == pytest.approx(steps[number - 1]["norm"], rel=1e-5, nan_ok=True), f"step {number}"
        assert row.sharded or len({repr(part) for part in parts}) == 1
        nonfinite = sum(source.series["grad/nonfinite"][number] for source in sources)
        assert (nonfinite == 0) == math.isfinite(norm), f"step {number}"


def test_every_reason_is_used_and_every_absence_has_one() -> None:
    assert {reason for row in ROWS for reason in row.absent.values()} == set(REASONS)
    assert {column for row in ROWS for column in row.absent} <= set(COLUMNS)
