from __future__ import annotations

import math

import pytest

from perfagent.delivery.backlog import events_only, halves, nothing, thin
from perfagent.delivery.columns import pack
from perfagent.wire import Event, Group


def columns(steps: list[int], **values: list[float]) -> Group:
    return Group(
        step=steps, time=[float(step) for step in steps], monotonic=[float(step) for step in steps],
        values={name: pack(column) for name, column in values.items()},
    )  # fmt: skip


@pytest.mark.fault
def test_a05_bad_loss_or_gradient_stays_beside_the_events() -> None:
    event = Event(kind="alert", time=1.0, data={})
    bad, worse = columns([1, 2], loss=[1.0, math.nan]), columns([1], **{"grad/norm": [math.inf]})
    assert events_only([columns([1], loss=[1.0]), bad, columns([1], lr=[math.nan]), worse], [event]) == (
        [bad, worse],
        [event],
    )
    assert nothing([bad], [event]) == ([], [])


def test_of_sixteen_rows_first_extremes_and_nonfinite_stay() -> None:
    steps = [*range(100, 140)]
    loss, rate = [5.0] * 40, [float(row) for row in range(40)]
    loss[3], loss[9], loss[20], loss[29], loss[39] = 1.0, 8.0, 0.5, 7.0, 9.0
    rate[25] = math.inf
    event = Event(kind="alert", time=1.0, data={})
    (kept,), events = thin([columns(steps, lr=rate, loss=loss)], [event])
    rows = [0, 3, 9, 16, 20, 25, 29, 32, 39]
    assert [*kept.steps()] == [100 + row for row in rows]
    assert [*kept.column("loss")] == [loss[row] for row in rows]
    assert [*kept.column("lr")] == [rate[row] for row in rows]
    assert events == [event]


@pytest.mark.parametrize(("bad", "at"), [(math.nan, 0), (math.inf, 3), (-math.inf, 15)])
def test_nonfinite_loss_hides_no_extreme_of_the_others(bad: float, at: int) -> None:
    loss = [1.0] * 16
    loss[at], loss[5], loss[9] = bad, 100.0, -50.0
    (kept,), _ = thin([columns([*range(16)], loss=loss)], [])
    assert [*kept.steps()] == sorted({0, at, 5, 9})


@pytest.mark.parametrize("lengths", [(2,), (5,), (1, 1), (1, 2, 4), (7, 1, 1)])
def test_halves_are_of_equal_size_events_go_with_the_first(lengths: tuple[int, ...]) -> None:
    groups = [
        columns([*range(10 * number, 10 * number + length)], x=[0.5] * length) for number, length in enumerate(lengths)
    ]
    told = [Event(kind="alert", time=float(number), data={}) for number in range(3)]
    parts = halves(groups, told)
    assert parts is not None
    (left, first), (right, second) = parts
    taken = [[step for group in half for step in group.steps()] for half in (left, right)]
    assert [step for half in taken for step in half] == [step for group in groups for step in group.steps()]
    assert list(map(len, taken)) == [sum(lengths) // 2, sum(lengths) - sum(lengths) // 2]
    assert (first, second) == (told, [])


def test_single_row_is_parted_from_the_events() -> None:
    row, told = columns([7], x=[0.5]), [Event(kind="alert", time=float(number), data={}) for number in range(3)]
    assert halves([row], told) == (([row], []), ([], told))
    assert halves([], told) == (([], told[:1]), ([], told[1:]))
    assert halves([row], []) is None
    assert halves([], told[:1]) is None
