"""Halves of a frame. What goes to the disk, and what of it goes where there is no room, is in test_spool.py."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest

from perfagent.delivery.backlog import Outgoing, halves
from perfagent.wire import Event, Group

TOLD = [Event(kind="alert", time=float(number), data={}) for number in range(3)]


def group(steps: int, *names: str) -> Group:
    times = [float(step) for step in range(steps)]
    return Group([*range(steps)], times, times, {name: [0.5 + at for at in times] for name in names})  # type: ignore[arg-type]


def values_of(frame: Outgoing) -> list[Any]:
    samples = ((step, name) for one in frame.groups for name in one.values for step in one.steps())
    return sorted(samples) + [event.time for event in frame.events]


@pytest.mark.parametrize(
    ("groups", "events"),
    [
        ([group(5, "a", "b")], TOLD),
        ([group(2, "a"), group(1, "b"), group(4, "c")], TOLD[:1]),
        ([], TOLD),
        ([group(1, "a")], []),
    ],
)
def test_halved_again_and_again_each_value_and_event_is_alone(groups: list[Group], events: list[Event]) -> None:
    """Each once. The events of several rows stay with the first half."""
    whole = Outgoing(7, groups, events, 3)
    frames, single = [whole], list[Outgoing]()
    while frames:
        two = halves(frame := frames.pop())
        assert two is None or all(one.upto == 3 and values_of(one) for one in two)
        if two and sum(one.rows for one in frame.groups) > 1:
            assert (two[0].events, two[1].events) == (frame.events, [])
        frames += two or ()
        single += [] if two else [frame]
    assert [len(values_of(one)) for one in single] == [1] * len(values_of(whole))
    assert sorted(chain.from_iterable(map(values_of, single)), key=str) == sorted(values_of(whole), key=str)
