"""No rule raises an alert over a training in which nothing is wrong, whatever its loss looks like."""

from __future__ import annotations

from pathlib import Path

import pytest
from case_selection import everyday
from healthy_losses import HEALTHY, made
from judging import DATA, fired, judge_series, read_curve

from perfagent_server.rules.catalogue import all_rules

CURVES = sorted((DATA / "loss_curves").glob("*.csv"), key=lambda path: path.stat().st_size)
ON_THE_LOSS = tuple(rule for rule in all_rules() if ".rules.loss." in type(rule).__module__)
UNLUCKY = {("temporal difference", 4): "it happens to grow fourfold in 30 of its first 200 steps"}


@pytest.mark.parametrize(
    ("seed", "kind"), everyday(len(HEALTHY), [(seed, kind) for seed in range(6) for kind in HEALTHY])
)
def test_a_healthy_loss_of_any_kind_raises_no_alert(seed: int, kind: str) -> None:
    changes, _ = judge_series(made(kind, seed), rules=ON_THE_LOSS)
    told = [change.finding.message for change in fired(changes) if change.finding.severity != "info"]
    assert len(told) == (1 if (kind, seed) in UNLUCKY else 0), told


@pytest.mark.parametrize("path", everyday(3, CURVES), ids=lambda path: path.stem[-36:])
def test_a_real_healthy_pre_training_raises_no_alert(path: Path) -> None:
    columns = read_curve(path)
    first = int(columns.pop("step")[0])
    changes, _ = judge_series(columns, first_step=first + 1, rows=500)
    assert [change.finding.message for change in fired(changes) if change.finding.severity != "info"] == []
