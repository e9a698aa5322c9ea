"""Halves and thinner copies of a frame. What of them goes to the disk is in test_spool.py."""

from __future__ import annotations

import math

import pytest

from perfagent.delivery.backlog import events_only, halves, nothing, thin
from perfagent.delivery.columns import pack
from perfagent.wire import Event, Group

TOLD = [Event(kind="alert", time=float(number), data={}) for number in range(3)]


def columns(steps: list[int], **values: list[float]) -> Group:
    times = [float(step) for step in steps]
    return Group(steps, times, times, {name: pack(column) for name, column in values.items()})  # type: ignore[arg-type]


@pytest.mark.fault
def test_a05_bad_loss_or_gradient_stays_beside_the_events() -> None:
    bad, worse = columns([1, 2], loss=[1.0, math.nan]), columns([1], **{"grad/norm": [math.inf]})
    calm = columns([1], loss=[1.0]), columns([1], lr=[math.nan])
    assert events_only([calm[0], bad, calm[1], worse], TOLD) == ([bad, worse], TOLD)
    assert nothing([bad], TOLD) == ([], [])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_of_sixteen_rows_first_extremes_and_nonfinite_stay(bad: float) -> None:
    loss, rate = [5.0] * 40, [float(row) for row in range(40)]
    loss[3], loss[9], loss[20], loss[29], loss[39], loss[0] = 1.0, 8.0, 0.5, 7.0, 9.0, bad
    rate[25] = math.inf
    (kept,), events = thin([columns([*range(100, 140)], lr=rate, loss=loss)], TOLD)
    rows = [0, 3, 9, 16, 20, 25, 29, 32, 39]
    assert [*kept.steps()] == [100 + row for row in rows]
    assert repr([*kept.column("loss")]) == repr([loss[row] for row in rows])
    assert [*kept.column("lr")] == [rate[row] for row in rows]
    assert events == TOLD


@pytest.mark.parametrize("lengths", [(2,), (5,), (1, 1), (1, 2, 4), (7, 1, 1)])
def test_halves_are_of_equal_size_events_go_with_the_first(lengths: tuple[int, ...]) -> None:
    groups = [columns([*range(10 * at, 10 * at + count)], x=[0.5] * count) for at, count in enumerate(lengths)]
    parts = halves(groups, TOLD)
    assert parts is not None
    taken = [[step for group in half for step in group.steps()] for half, _ in parts]
    assert [step for half in taken for step in half] == [step for group in groups for step in group.steps()]
    assert list(map(len, taken)) == [sum(lengths) // 2, sum(lengths) - sum(lengths) // 2]
    assert [events for _, events in parts] == [TOLD, []]


def test_single_row_is_parted_from_the_events() -> None:
    row = columns([7], x=[0.5])
    assert halves([row], TOLD) == (([row], []), ([], TOLD))
    assert halves([], TOLD) == (([], TOLD[:1]), ([], TOLD[1:]))
    assert halves([row], []) is halves([], TOLD[:1]) is None
