"""A compiled model that is fed nine lengths: from the script to the finding, by all rules."""

from __future__ import annotations

from pathlib import Path

import pytest
from agent_recorded import Recording
from builders import job_environment
from judging import fired, make_evaluator
from preloaded import run

from perfagent_server.store.codec.tail import TailGroup
from perfagent_server.store.stored import FromTail

JOB = Path(__file__).parents[1] / "agent" / "hooks" / "compiling_job.py"


@pytest.mark.long
def test_nine_lengths_are_told_with_the_reason_and_what_to_do(tmp_path: Path) -> None:
    environment = job_environment(tmp_path, PERFAGENT_RECORD=str(tmp_path / "record"))
    [done] = run([str(JOB), "lengths", "--attach"], tmp_path, [environment])
    assert done.returncode == 0, done
    evaluator = make_evaluator()
    changes = []
    for number, (groups, events) in enumerate(Recording(tmp_path / "record").frames(), 1):
        last = max((group.times()[-1] for group in groups), default=evaluator.window.now)
        tail = [TailGroup.of_group(group) for group in groups]
        changes += evaluator.take(FromTail(number, "r", 1, 0, "s", number, last, tail, list(events)))
    [finding] = [change.finding for change in fired(changes, "recompiles")]
    assert finding.severity == "warning"
    assert "8 times for 9 lengths of dimension 1 of `tokens`" in finding.message
    assert "limit of 8" in finding.message
    assert "mark_dynamic" in finding.fix
    assert evaluator.verdict().rule == "recompiles"
