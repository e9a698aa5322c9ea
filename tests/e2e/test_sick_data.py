"""Trainings with a defect in their data or their optimizer: from the script to the finding, by all rules."""

from __future__ import annotations

from pathlib import Path

import pytest
from agent_recorded import Recording
from builders import job_environment
from judging import fired, make_evaluator
from preloaded import run

from perfagent_server.store.codec.tail import TailGroup
from perfagent_server.store.stored import FromTail

SCRIPT = Path(__file__).parent / "jobs" / "sick_data.py"
SECONDS = "9"


def findings(folder: Path, kind: str) -> dict[str, tuple[str, str]]:
    """rule -> (severity, cause) of all that fired in such a training."""
    environment = job_environment(folder, PERFAGENT_RECORD=str(folder / "record"))
    [done] = run([str(SCRIPT), kind, SECONDS], folder, [environment])
    assert done.returncode == 0, done
    evaluator = make_evaluator()
    changes = []
    for number, (groups, events) in enumerate(Recording(folder / "record").frames(), 1):
        last = max((group.times()[-1] for group in groups), default=evaluator.window.now)
        tail = [TailGroup.of_group(group) for group in groups]
        changes += evaluator.take(FromTail(number, "r", 1, 0, "s", number, last, tail, list(events)))
    return {change.finding.rule: (change.finding.severity, change.finding.cause) for change in fired(changes)}


@pytest.mark.parametrize(
    ("kind", "rule", "expected"),
    [
        pytest.param("workers", "data_repeats", ("warning", "several times in a row"), marks=pytest.mark.long),
        ("head_only", "wrong_optimizer", ("warning", "")),
        pytest.param("detached", "unchanged_tensor", ("warning", "no gradient"), marks=pytest.mark.long),
    ],
)
def test_the_illness_is_named(tmp_path: Path, kind: str, rule: str, expected: tuple[str, str]) -> None:
    assert findings(tmp_path, kind).get(rule) == expected


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "rule", "expected"),
    [
        ("sorted", "data_bug", ("warning", "one class a batch")),
        ("no_label", "data_bug", ("warning", "no label counts")),
        ("padding", "tokens_wasted", ("info", "")),
    ],
)
def test_other_illnesses_are_named(tmp_path: Path, kind: str, rule: str, expected: tuple[str, str]) -> None:
    assert findings(tmp_path, kind).get(rule) == expected


def test_a_healthy_training_is_silent(tmp_path: Path) -> None:
    ours = {"data_bug", "data_repeats", "tokens_wasted", "wrong_optimizer", "unchanged_tensor", "allocator_churn"}
    assert not ours & findings(tmp_path, "healthy").keys()
