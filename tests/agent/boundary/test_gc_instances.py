"""Objects found by their type, while other threads are at work."""

from __future__ import annotations

import gc
import sys
import threading
import time

from perfagent.boundary.gc_instances import instances_of


class Base: ...


class Derived(Base): ...


class Unrelated:
    @property
    def __class__(self) -> type:
        raise AssertionError("was asked for its class")


def test_instances_of_a_class_and_derived_ones_are_found():
    kept = [Base(), Derived(), Derived(), Unrelated()]
    assert {id(thing) for thing in instances_of(Base)} == {id(thing) for thing in kept[:3]}
    assert len(instances_of(Derived, Unrelated)) == 3


def test_no_thread_that_builds_a_tuple_is_hurt():
    """A scan that keeps the collector's list while other threads run makes their `tuple(generator)` fail."""
    ended = threading.Event()
    failed: list[BaseException] = []

    def build() -> None:
        while not ended.is_set():
            try:
                tuple(number for number in range(37))
            except SystemError as error:
                failed.append(error)

    def let_others_run(*_: object) -> None:
        time.sleep(1e-4)

    interval, thresholds = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(1e-5)
    gc.callbacks.append(let_others_run)
    threads = [threading.Thread(target=build) for _ in range(3)]
    kept = [Derived() for _ in range(5)]
    try:
        for thread in threads:
            thread.start()
        for scan in range(30):
            gc.set_threshold(1 + scan % 10, 10**6, 10**6)  # a collection may begin with any allocation
            assert len(instances_of(Derived)) == len(kept)
    finally:
        ended.set()
        gc.callbacks.remove(let_others_run)
        gc.set_threshold(*thresholds)
        sys.setswitchinterval(interval)
        for thread in threads:
            thread.join()
    assert not failed
