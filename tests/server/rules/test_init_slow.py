"""init_slow: a job that was started and whose first step does not end."""

from __future__ import annotations

from judging import state
from timed_job import TimedJob

from perfagent_server.rules.life.init_slow import InitSlow


def starting(minutes: int, *, ranks: int = 1, step: int = 0, heard: bool = True) -> TimedJob:
    """An agent reads its process every minute; step: the one in progress, which readings carry."""
    job = TimedJob(InitSlow(), ranks=ranks)
    job.step = step
    for _ in range(minutes):
        job.wait(60)
        if heard:
            job.read(process__rss_bytes=1e9)
    return job


def test_twenty_minutes_without_a_step_are_an_alert_that_the_first_step_resolves() -> None:
    job = starting(19, ranks=2)
    assert job.changes == []
    job.restart_server()
    job.wait(90)
    [found] = job.found("init_slow")
    assert (found.severity, found.ranks) == ("warning", [0, 1])
    assert found.title == "No step has ended in 20 minutes"
    assert "2 of 2 ranks are heard" in found.message
    assert "perfagent stacks RUN" in found.fix
    job.train(3, {"forward": 1.0})
    job.wait(30)
    assert [change.kind for change in job.changes if change.kind != "update"] == ["fire", "resolve"]


def test_a_job_that_steps_is_silent() -> None:
    job = starting(15)
    job.train(1, {"forward": 0.1})
    job.wait(3600)
    assert job.changes == []


def test_a_step_of_an_hour_is_the_business_of_other_rules() -> None:
    job = starting(1)
    job.train(2, {"forward": 3600.0})
    job.wait(30)
    assert [change.kind for change in job.changes if change.kind != "update"] == ["fire", "resolve"]


def test_what_log_counts_is_a_step() -> None:
    assert starting(60, step=5).changes == []


def test_a_run_without_an_agent_is_silent() -> None:
    assert starting(60, heard=False).changes == []


def test_a_resumed_job_counts_from_its_own_first_step() -> None:
    job = TimedJob(InitSlow())
    job.send([], events=[state("starting", start_step=5001)])
    job.step = 5000
    job.read(process__rss_bytes=1e9)
    job.wait(1230)
    assert len(job.found("init_slow")) == 1
