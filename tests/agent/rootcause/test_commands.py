"""Commands as an agent gets them: obeyed once, answered always, and only its own."""

from __future__ import annotations

import pytest


def test_a_command_that_comes_again_is_obeyed_once(train):
    job = train()
    for _ in range(3):
        job.command("stacks", "s1")
    assert len(job.events("stacks")) == 1
    assert job.answers("s1") == [("done", "")]


def test_what_it_does_not_know_it_says(train):
    job = train()
    job.command("reboot", "x1")
    job.command("flush", "f1")
    assert job.answers("f1") == [("done", "")]
    ((state, message),) = job.answers("x1")
    assert state == "refused"
    assert "flush, profile, sampling, stacks, stop, not 'reboot'" in message


def test_sampling_is_changed_within_limits(train):
    job = train()
    periods: list[float] = []
    job.watch.set_sample_period = periods.append
    asked = [{"sample_s": at} for at in (0.49, 0.5, 3600, 3601)]
    asked += [{"overhead_budget_pct": at} for at in (0.009, 0.01, 50, 50.1, float("nan"))]
    for number, params in enumerate(asked):
        job.command("sampling", str(number), **params)
    states = [job.answers(str(number))[0][0] for number in range(len(asked))]
    assert states == ["refused", "done", "done", "refused", "refused", "done", "done", "refused", "refused"]
    assert periods == [0.5, 3600.0]


@pytest.mark.parametrize("odd", [{}, {"kind": 7}, {"kind": "profile", "params": "x"}, {"id": ["a"], "kind": "stacks"}])
def test_an_odd_command_does_no_harm(train, odd):
    job = train()
    for callback in job.sender.on_command:
        callback(odd)
    job.steps(2)
    assert len(job.losses) == 2
