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


def test_a_hook_may_be_called_by_names_that_it_knows():
    """As trainers beside the Transformers' call the handler of callbacks that we patch."""
    told = []

    @guarded
    def hook(first, *, second):
        told.append((first, second))

    hook(1, second=2)
    assert not failures
    hook(1, unknown=2)
    hook(3, second=4)
    assert told == [(1, 2)], "it is turned off"
    assert [name.rpartition(".")[2] for name in failures] == ["hook"]


class TimeLimit:
    """As scripts have them: a method, an object that can be called, a part of a function."""

    def over(self, _signal: int, _frame: object) -> None:
        raise TimeoutError

    def __call__(self, _signal: int, _frame: object) -> None:
        raise TimeoutError


@pytest.mark.parametrize(
    "handler",
    [TimeLimit().over, TimeLimit(), functools.partial(TimeLimit.over, None), functools.partial(TimeLimit())],
    ids=["method", "object", "partial", "partial of an object"],
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
    calls = []

    @guarded
    def hook():
        calls.append(1)
        raise ValueError("seven")

    for _ in range(3):
        hook()
    assert (len(calls), [*failures.values()]) == (1, [1])
    reset()
    hook()
    assert len(calls) == 2
