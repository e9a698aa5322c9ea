"""When time alone changes something in a run."""

from __future__ import annotations

import math

import pytest

from perfagent_server.engine.due_times import DueTimes


@pytest.mark.parametrize("still_due", [1.0, math.nan])
def test_a_run_that_stays_due_is_looked_at_once_in_a_round(still_due: float) -> None:
    due, looked = DueTimes(), []
    due.set("r", 1.0)
    for run in due.pop(5.0):
        looked.append(run)
        assert len(looked) == 1, "it would go on for ever"
        due.set(run, still_due)
        due.put_off(run, 5.0, 6.0)
    assert list(due.pop(5.9)) == []
    assert list(due.pop(6.0)) == ["r"]


def test_only_the_time_that_was_set_last_counts() -> None:
    due = DueTimes()
    for time in (3.0, 1.0, 2.0):
        due.set("r", time)
    due.set("gone", 1.0)
    due.set("gone", None)
    assert list(due.pop(1.5)) == []
    assert list(due.pop(9.0)) == ["r"]
