"""Stacks of threads that hang: in a sleep, on a lock, in C."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import torch
from builders import until

from perfagent.rootcause import stacks
from perfagent.rootcause.stacks import MOST_FRAMES, all_stacks


class Hanging:
    """A thread that hangs in `wait` until it is let go."""

    def __init__(self, wait: Callable[[], Any]) -> None:
        self.thread = threading.Thread(target=self._wait_here, args=(wait,), name="hanging")
        self.thread.start()

    def _wait_here(self, wait: Callable[[], Any]) -> None:
        wait()

    def stack(self) -> dict[str, Any]:
        def there() -> dict[str, Any] | None:
            found = [one for one in all_stacks(self.thread.ident or 0) if one["name"] == "hanging"]
            return found[0] if found and any("_wait_here" in frame for frame in found[0]["frames"]) else None

        return until(there)


def test_a_thread_that_waits_for_a_lock_is_shown_at_the_line_where_it_waits():
    lock = threading.Lock()
    lock.acquire()

    def take_the_lock() -> None:
        lock.acquire()

    hanging = Hanging(take_the_lock)
    try:
        # it stands at that line for a moment before the kernel lets it sleep
        stack = until(
            lambda: (one := hanging.stack()) and "take_the_lock" in one["frames"][-1] and one["state"] == "S" and one
        )
        assert stack["frames"][-1].endswith("take_the_lock: lock.acquire()")
        assert stack["training"]
        assert not stack["main"]
    finally:
        lock.release()
        hanging.thread.join()


def test_a_thread_that_waits_in_c_is_shown_too():
    queue: SimpleQueue[int] = SimpleQueue()
    hanging = Hanging(queue.get)
    try:
        assert "_wait_here" in hanging.stack()["frames"][-1]
    finally:
        queue.put(1)
        hanging.thread.join()


def test_code_without_line_numbers_is_named_and_takes_no_other_stack_along():
    queue: SimpleQueue[int] = SimpleQueue()

    def generated() -> None:
        queue.get()

    generated.__code__ = generated.__code__.replace(co_linetable=b"")
    hanging = Hanging(generated)
    try:
        stack = until(lambda: (one := hanging.stack()) and "generated" in one["frames"][-1] and one)
        assert stack["frames"][-1] == f"{__file__}:0 in {generated.__qualname__}"
    finally:
        queue.put(1)
        hanging.thread.join()


def test_the_main_thread_comes_next_and_deep_stacks_are_cut():
    def deep(left: int) -> list[dict[str, Any]]:
        return deep(left - 1) if left else all_stacks(0)

    (main,) = [one for one in deep(200) if one["main"]]
    assert main["name"] == "MainThread"
    assert len(main["frames"]) == MOST_FRAMES + 1
    assert main["frames"][0].startswith("... ")


def test_of_many_threads_the_training_and_the_main_thread_are_always_among_those_that_are_shown(monkeypatch):
    """They are the oldest, and the interpreter names the newest first."""
    monkeypatch.setattr(stacks, "MOST_THREADS", 3)
    over = threading.Event()
    threads = [threading.Thread(target=over.wait, name=f"pool-{number}") for number in range(6)]
    for thread in threads:
        thread.start()
    try:
        shown = all_stacks(threads[0].ident or 0)
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert [one["name"] for one in shown][:2] == ["pool-0", "MainThread"]
    assert len(shown) == 4
    assert re.fullmatch(r"\.\.\. \d+ more threads", shown[-1]["name"])


def test_stacks_on_command_name_the_training_thread_and_carry_no_secret(record):
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorded = record(model)
    for _ in range(3):
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()

    def asked_for(api_key: str) -> None:
        for callback in recorded.sender.on_command:
            callback({"id": "s1", "kind": "stacks", "params": {"why": "no step for 90 s"}})

    asked_for("sk-abcdefghijklmnopqrstuvwxyz")
    (found,) = [data for kind, data, _ in recorded.sender.events if kind == "stacks"]
    assert (found["command"], found["step"], found["why"]) == ("s1", 3, "no step for 90 s")
    assert found["threads"][0]["training"]
    assert any("asked_for" in frame for frame in found["threads"][0]["frames"])
    assert "sk-abcdefghij" not in str([thread for thread in found["threads"] if thread["name"] != "MainThread"])
