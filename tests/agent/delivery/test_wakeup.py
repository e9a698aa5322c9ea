from __future__ import annotations

import signal
import threading

from perfagent.delivery.wakeup import Bell, start_deaf


def test_rings_before_the_wait_are_one_a_signal_handler_too() -> None:
    bell = Bell()
    before = signal.signal(signal.SIGALRM, lambda *_: bell.ring())
    try:
        bell.ring()
        bell.ring()
        assert bell.wait(0) and not bell.wait(0)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        assert bell.wait(10)
    finally:
        signal.signal(signal.SIGALRM, before)


def test_deaf_thread_hears_no_signal_but_its_own_faults() -> None:
    """So do those that it starts; its starter hears all."""
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
