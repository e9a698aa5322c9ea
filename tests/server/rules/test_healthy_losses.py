"""No rule on the loss raises an alert over a training in which nothing is wrong, whatever its loss looks like."""

from __future__ import annotations

import pytest
from healthy_losses import HEALTHY, made
from judging import DATA, fired, judge_series, read_curve

from perfagent_server.rules.catalogue import all_rules

CURVES = sorted((DATA / "loss_curves").glob("*.csv"))
ON_THE_LOSS = tuple(rule for rule in all_rules() if ".rules.loss." in type(rule).__module__)
UNLUCKY = {("temporal difference", 4): "it happens to grow fourfold in 30 of its first 200 steps"}


@pytest.mark.parametrize("kind", HEALTHY)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2, 3, 4, 5))])
def test_a_healthy_loss_of_any_kind_raises_no_alert(kind: str, seed: int) -> None:
    changes, _ = judge_series(made(kind, seed), rules=ON_THE_LOSS)
    told = [change.finding.message for change in fired(changes) if change.finding.severity != "info"]
    assert len(told) == (1 if (kind, seed) in UNLUCKY else 0), told


@pytest.mark.parametrize("path", CURVES, ids=lambda path: path.stem[-36:])
def test_a_real_healthy_pre_training_raises_no_alert(path: object) -> None:
    columns = read_curve(path)  # type: ignore[arg-type]
    first = int(columns.pop("step")[0])
    changes, _ = judge_series(columns, first_step=first + 1, rules=ON_THE_LOSS)
    assert [change.finding.message for change in fired(changes) if change.finding.severity != "info"] == []
