from __future__ import annotations

import signal
import threading
import time

from perfagent.delivery.wakeup import Bell, start_deaf


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


def test_a_deaf_thread_and_those_that_it_starts_hear_no_signal_but_their_own_faults_and_the_starter_hears_all() -> None:
    masks: list[set[int]] = []

    def note() -> None:
        masks.append(set(signal.pthread_sigmask(signal.SIG_BLOCK, [])))

    def both() -> None:
        note()
        child = threading.Thread(target=note)
        child.start()
        child.join()

    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    thread = threading.Thread(target=both)
    start_deaf(thread)
    thread.join()
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before
    for mask in masks:
        assert mask >= {signal.SIGTERM, signal.SIGINT, signal.SIGALRM, signal.SIGCHLD, signal.SIGXFSZ, signal.SIGPIPE}
        assert not mask & {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT}
    assert len(masks) == 2
