"""What a hook raises, and how it may be called."""

from __future__ import annotations

import functools
import signal
import weakref

import pytest

from perfagent.boundary.guard import failures, guarded, reset


@pytest.fixture(autouse=True)
def nothing_failed():
    reset()
    yield
    reset()


def test_the_record_of_a_failure_keeps_nothing_of_the_script(caplog):
    class Batch:
        pass

    @guarded
    def hook():
        raise ValueError("seven")

    batch = Batch()
    held = weakref.ref(batch)

    def script(batch):
        hook()

    script(batch)
    del batch
    assert "ValueError: seven" in caplog.text
    assert held() is None


class TimeLimit:
    """As scripts have them: a method, an object that can be called, a part of a function."""

    def over(self, _signal: int, _frame: object) -> None:
        raise TimeoutError

    def __call__(self, _signal: int, _frame: object) -> None:
        raise TimeoutError


@pytest.mark.parametrize(
    "handler", [TimeLimit().over, functools.partial(TimeLimit())], ids=["method", "partial of an object"]
)
def test_what_a_signal_handler_raises_goes_through_a_hook(handler):
    hook = guarded(lambda: signal.raise_signal(signal.SIGALRM))
    before = signal.signal(signal.SIGALRM, handler)
    try:
        with pytest.raises(TimeoutError):
            hook()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not failures


def test_a_hook_that_failed_rests_until_the_next_run():
    told = []

    @guarded
    def hook(first, *, second):
        told.append((first, second))

    hook(1, second=2)
    assert not failures
    for _ in range(2):
        hook(1, unknown=2)
    hook(3, second=4)
    assert (told, [*failures.values()]) == ([(1, 2)], [1])
    reset()
    hook(3, second=4)
    assert told == [(1, 2), (3, 4)]
