"""Stacks of threads that hang: in a sleep, on a lock, in C."""

from __future__ import annotations

import re
import threading
from dataclasses import replace
from typing import Any

import pytest
from builders import until

from perfagent.causes.stacks import MOST_FRAMES, MOST_THREADS, all_stacks
from perfagent.causes.standstill import Pulse, goes_on
from perfagent.delivery.records import Header
from perfagent.delivery.segments import Segments
from perfagent.process.pids import machine


def test_a_thread_that_waits_for_a_lock_is_shown_at_its_line():
    lock = threading.Lock()
    lock.acquire()

    def take_the_lock() -> None:
        lock.acquire()

    thread = threading.Thread(target=take_the_lock, name="hanging")
    thread.start()

    def there() -> dict[str, Any] | None:
        # it stands at that line for a moment before the kernel lets it sleep
        found = [one for one in all_stacks(thread.ident or 0) if one["name"] == "hanging" and one.get("state") == "S"]
        return found[0] if found and "take_the_lock" in found[0]["frames"][-1] else None

    try:
        stack = until(there)
    finally:
        lock.release()
        thread.join()
    assert stack["frames"][-1].endswith("take_the_lock: lock.acquire()")
    assert (stack["training"], stack["main"]) == (True, False)


def test_of_many_threads_the_training_and_main_thread_are_shown():
    """They are the oldest, and the interpreter names the newest first."""
    over = threading.Event()

    def deep(left: int) -> list[dict[str, Any]]:
        return deep(left - 1) if left else all_stacks(threads[0].ident or 0)

    threads = [threading.Thread(target=over.wait, name=f"pool-{number}") for number in range(MOST_THREADS)]
    for thread in threads:
        thread.start()
    try:
        shown = deep(200)
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert [one["name"] for one in shown][:2] == ["pool-0", "MainThread"]
    assert len(shown) == MOST_THREADS + 1
    assert len(shown[1]["frames"]) == MOST_FRAMES + 1 and shown[1]["frames"][0].startswith("... ")
    assert re.fullmatch(r"\.\.\. \d+ more threads", shown[-1]["name"])


def test_stacks_name_the_training_thread_and_carry_no_secret(train):
    job = train()
    job.steps(3)

    def asked_for(api_key: str) -> None:
        job.command("stacks", "s1", why="no step for 90 s")

    asked_for("sk-abcdefghijklmnopqrstuvwxyz")
    (found,) = job.events("stacks")
    assert (found["command"], found["step"], found["why"]) == ("s1", 3, "no step for 90 s")
    assert found["threads"][0]["training"]
    assert any("asked_for" in frame for frame in found["threads"][0]["frames"])
    assert "sk-abcdefghij" not in str([thread for thread in found["threads"] if thread["name"] != "MainThread"])


def test_a_training_that_stands_is_looked_at_unasked(train):
    """When no pause was as long, then at twice that; later only when one is longer still."""
    job = train()
    job.steps(3)

    def stands(end: int, seconds: int, held_s: int = 0) -> list[float]:
        before, job.progress.step_end = len(job.events("stacks")), end * 10**9
        for at in range(seconds * 2 + 1):
            job.watch.clock = lambda at=at: end + at / 2 + (held_s if at > 1 else 0)
            job.watch.poll()
        return [one["quiet_s"] for one in job.events("stacks")[before:]]

    assert stands(100, 2, held_s=3600) == [], "a process that was stopped could not train"
    assert stands(200, 12) == [5.0, 10.0]
    assert stands(300, 11) == []
    assert stands(400, 60) == [12.0, 24.0, 48.0]
    last = job.events("stacks")[-1]
    assert (last["look"], last["longest_s"], last["threads"][0]["training"]) == (3, 12.0, True)
    assert last["goes_on"], "this very thread looks"
    job.model.eval()
    assert stands(500, 61) == [60.0]
    assert job.events("stacks")[-1]["within"] == "eval"


def test_of_other_ranks_those_of_this_machine_alone_are_told(train, tmp_path):
    """Spools of other hosts, and of containers, may be on the same disk; those of before do not say where they are."""
    job = train()
    job.steps(3)
    job.sender.identity.world_size, job.sender.folder = 4, tmp_path / "mine"
    for rank, where in enumerate((machine(), "another", ""), start=1):
        header = Header(source="s", project="p", rank=rank, server=None, run="recorded", attempt=1, machine=where)
        Segments(tmp_path / f"{rank}", header).write_header("ticks")
    job.progress.step_end = 10**9
    for at in range(1, 8):
        job.watch.clock = lambda at=at: float(at)
        job.watch.poll()
    assert [one["others"] for one in job.events("stacks")] == [{"1": "gone"}]


@pytest.mark.parametrize(
    ("now", "what"),
    [
        ({}, ""),
        ({"hooks": (1, 9)}, "hooks"),
        ({"cpu_s": 0.2}, ""),
        ({"cpu_s": 0.3}, "computes"),
        ({"is_busy": True}, "computes"),
        ({"moved": 1}, "moves bytes"),
        ({"switches": 19}, ""),
        ({"switches": 21, "sleeps": True}, ""),
        ({"switches": 21}, "unsure"),
    ],
)
def test_what_grows_between_two_looks_says_what_goes_on(now: dict[str, Any], what: str) -> None:
    still = Pulse(at=5.0, hooks=(1, 3), cpu_s=0.0, moved=0, switches=0, sleeps=False, is_busy=False)
    assert goes_on(still, replace(still, at=10.0, **now), spins=False) == what
    assert goes_on(still, replace(still, at=10.0, cpu_s=0.3), spins=True) == "unsure"
