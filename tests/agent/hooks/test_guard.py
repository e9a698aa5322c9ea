"""What a hook raises, and how it may be called."""

from __future__ import annotations

import weakref

import pytest

from perfagent.hooks.guard import failures, guarded, reset


@pytest.fixture(autouse=True)
def nothing_failed():
    reset()
    yield
    reset()


def test_a_hook_may_be_called_by_names():
    """As trainers beside the Transformers' call the handler of callbacks that we patch."""
    told = []

    @guarded
    def hook(first, *, second):
        told.append((first, second))

    hook(1, second=2)
    assert told == [(1, 2)]


def test_who_keeps_the_record_of_a_failure_keeps_nothing_of_the_script(caplog):
    class Batch:
        """Of what the script has in its hands."""

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


def test_a_hook_that_is_called_in_a_way_that_it_does_not_know_is_turned_off():
    @guarded
    def hook():
        raise AssertionError("never called")

    hook(unknown=1)
    assert [name.rpartition(".")[2] for name in failures] == ["hook"]
