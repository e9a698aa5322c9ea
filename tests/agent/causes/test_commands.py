"""Commands as an agent gets them: obeyed once, answered always, and only its own."""

from __future__ import annotations


def test_a_command_is_obeyed_once_and_an_odd_one_does_no_harm(train):
    job = train()
    for _ in range(3):
        job.command("stacks", "s1")
    job.command("reboot", "x1")
    job.command("flush", "f1")
    assert len(job.events("stacks")) == 1
    assert job.answers("s1") == job.answers("f1") == [("done", {})]
    known = ["flush", "profile", "sampling", "stacks", "stop"]
    assert job.answers("x1") == [("refused", {"key": "unknown", "known": known, "kind": "'reboot'"})]
    for odd in ({}, {"kind": 7}, {"kind": "profile", "params": "x"}, {"id": ["a"], "kind": "stacks"}):
        for callback in job.sender.on_command:
            callback(odd)
    job.steps(2)
    assert len(job.losses) == 2


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
