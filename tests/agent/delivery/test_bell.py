from __future__ import annotations

import signal
import threading
import time

from perfagent.delivery.bell import Bell


def test_a_ring_before_the_wait_is_kept_and_several_are_one() -> None:
    bell = Bell()
    bell.ring()
    bell.ring()
    assert bell.wait(0)
    assert not bell.wait(0)


def test_a_wait_ends_with_the_ring_of_another_thread() -> None:
    bell, heard = Bell(), threading.Event()
    thread = threading.Thread(target=lambda: bell.wait() and heard.set())
    thread.start()
    assert not heard.is_set()
    bell.ring()
    thread.join(10)
    assert heard.is_set()


def test_no_ring_is_the_end_of_the_time() -> None:
    begin = time.monotonic()
    assert not Bell().wait(0.05)
    assert time.monotonic() - begin >= 0.05
    assert not Bell().wait(-1.0)


def test_a_signal_handler_may_ring_for_the_thread_that_it_interrupts() -> None:
    bell = Bell()
    before = signal.signal(signal.SIGALRM, lambda *_: bell.ring())
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        assert bell.wait(10)
    finally:
        signal.signal(signal.SIGALRM, before)


def test_every_ring_is_heard_when_several_ring_at_once() -> None:
    bell, work, done = Bell(), [0], []

    def ring() -> None:
        for _ in range(1000):
            work.append(1)
            bell.ring()

    threads = [threading.Thread(target=ring) for _ in range(4)]
    for thread in threads:
        thread.start()
    while len(done) < 4001:
        while work:
            done.append(work.pop())
        if len(done) < 4001:
            assert bell.wait(10)
    for thread in threads:
        thread.join()
    assert len(done) == 4001
