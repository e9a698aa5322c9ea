"""init_slow: a job that was started and whose first step does not end."""

from __future__ import annotations

from judging import state
from syrupy.assertion import SnapshotAssertion
from timed_job import TimedJob

from perfagent_server.rules.life.init_slow import InitSlow


def starting(minutes: int, *, ranks: int = 1, step: int = 0, heard: bool = True, at: str = "") -> TimedJob:
    """An agent reads its process every minute; step: the one in progress, which readings carry; at: where it stands."""
    job = TimedJob(InitSlow(), ranks=ranks)
    job.step = step
    if at:
        threads = [{"main": True, "training": False, "frames": ["/job/train.py:5 in main", at]}]
        job.event("stacks", {"threads": threads})
    for _ in range(minutes):
        job.wait(60)
        if heard:
            job.read(process__rss_bytes=1e9)
    return job


def test_twenty_minutes_without_a_step_are_told_until_the_first(words: SnapshotAssertion) -> None:
    job = starting(19, ranks=2)
    assert job.changes == []
    job.restart_server()
    job.wait(90)
    [found] = job.found("init_slow")
    assert (found.severity, found.ranks) == ("warning", [0, 1])
    assert (found.title, found.message, found.fix) == words
    job.train(3, {"forward": 1.0})
    job.wait(30)
    assert job.kinds == ["fire", "resolve"]


def test_ranks_that_wait_for_others_are_told_sooner() -> None:
    library = "/v/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py:1722 in init_process_group"
    [found] = starting(6, at=library).found("init_slow")
    assert (found.cause, found.severity) == ("joining", "warning")
    assert starting(6, at="/job/train.py:9 in tokenize").changes == []


def test_a_job_that_steps_or_has_no_agent_is_silent() -> None:
    stepping = starting(15)
    stepping.train(1, {"forward": 0.1})
    stepping.wait(3600)
    logs, unheard = starting(60, step=5), starting(60, heard=False)
    assert stepping.changes == logs.changes == unheard.changes == []


def test_a_resumed_job_counts_from_its_own_first_step() -> None:
    job = TimedJob(InitSlow())
    job.send([], events=[state("starting", start_step=5001)])
    job.step = 5000
    job.read(process__rss_bytes=1e9)
    job.wait(1230)
    assert len(job.found("init_slow")) == 1
