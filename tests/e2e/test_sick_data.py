"""Trainings with a defect in their data or their optimizer: from the script to the finding, by all rules."""

from __future__ import annotations

from pathlib import Path

import pytest
from agent_recorded import Recording
from builders import job_environment
from judging import fired, make_evaluator
from preloaded import run

from perfagent.wire import Finding
from perfagent_server.store.codec.tail import TailGroup
from perfagent_server.store.stored import FromTail

pytestmark = pytest.mark.real
SCRIPT = Path(__file__).parent / "jobs" / "sick_data.py"
SECONDS = "9"


def findings(folder: Path, kind: str) -> dict[str, Finding]:
    """By its rule each finding that fired in such a training."""
    environment = job_environment(folder, PERFAGENT_RECORD=str(folder / "record"))
    [done] = run([str(SCRIPT), kind, SECONDS], folder, [environment])
    assert done.returncode == 0, done
    evaluator = make_evaluator()
    changes = []
    for number, (groups, events) in enumerate(Recording(folder / "record").frames(), 1):
        last = max((group.times()[-1] for group in groups), default=evaluator.window.now)
        tail = [TailGroup.of_group(group) for group in groups]
        changes += evaluator.take(FromTail(number, "r", 1, 0, "s", number, last, tail, list(events)))
    return {change.finding.rule: change.finding for change in fired(changes)}


@pytest.mark.parametrize(
    ("kind", "rule", "cause"),
    [
        ("head_only", "wrong_optimizer", ""),
        pytest.param("workers", "data_repeats", "several times in a row", marks=pytest.mark.long),
        pytest.param("sorted", "data_bug", "one class a batch", marks=pytest.mark.long),
        pytest.param("no_label", "data_bug", "no label counts", marks=pytest.mark.long),
    ],
)
def test_the_illness_is_named(tmp_path: Path, kind: str, rule: str, cause: str) -> None:
    found = findings(tmp_path, kind)[rule]
    assert (found.severity, found.cause) == ("warning", cause)


@pytest.mark.long
def test_a_compiled_model_that_is_fed_nine_lengths_recompiles(tmp_path: Path) -> None:
    found = findings(tmp_path, "lengths")["recompiles"]
    assert found.severity == "warning"
    assert "8 times for 9 lengths of dimension 1 of `tokens`" in found.message
    assert "mark_dynamic" in found.fix


def test_a_healthy_training_is_silent(tmp_path: Path) -> None:
    ours = {"data_bug", "data_repeats", "tokens_wasted", "wrong_optimizer", "unchanged_tensor", "allocator_churn"}
    assert not ours & findings(tmp_path, "healthy").keys()
