"""Objects found by their type, while other threads are at work."""

from __future__ import annotations

import sys
import threading

from perfagent.boundary.gc_instances import living


class Base: ...


class Derived(Base): ...


class Unrelated:
    @property
    def __class__(self) -> type:
        raise AssertionError("was asked for its class")


def test_instances_of_a_class_and_derived_ones_are_found():
    kept = [Base(), Derived(), Derived(), Unrelated()]
    assert {id(thing) for thing in living(Base)} == {id(thing) for thing in kept[:3]}
    assert len(living(Derived, Unrelated)) == 3


def test_no_thread_that_builds_a_tuple_is_hurt():
    """A scan that keeps the collector's list for a moment makes `tuple(generator)` of other threads fail, about once a
    scan."""
    ended = threading.Event()
    failed: list[BaseException] = []

    def build() -> None:
        while not ended.is_set():
            try:
                tuple(number for number in range(37))
            except SystemError as error:
                failed.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    threads = [threading.Thread(target=build) for _ in range(3)]
    kept = [Derived() for _ in range(5)]
    try:
        for thread in threads:
            thread.start()
        for _ in range(20):
            assert len(living(Derived)) == len(kept)
    finally:
        ended.set()
        sys.setswitchinterval(interval)
        for thread in threads:
            thread.join()
    assert not failed
