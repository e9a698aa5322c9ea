"""What receivers are told of an alert about a level that jumps around its threshold: little, in time, and at last the
truth."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import NamedTuple

import pytest
from judging import restored
from told import Told

from perfagent_server.alerts.batches import what_is_due

STEP_S = 0.5
WINDOW = 20  # steps of data_bound


class Message(NamedTuple):
    at: float
    alert: str
    event: str


def look(told: Told) -> list[Message]:
    """A receiver gets at once whatever is due."""
    with told.database.read() as connection:
        rows = [row for batch in what_is_due(connection, told.now, {}).batches for row in batch.rows]
    told.deliver([row["id"] for row in rows])
    return [
        Message(told.now, row["alert"], row["event"].removeprefix("alert."))
        for row in rows
        if json.loads(row["body"])["data"]["alert"]["rule"] == "data_bound"
    ]


def play(told: Told, seconds: float, share_of: Callable[[int], float], *, first: int = 1) -> list[Message]:
    """Steps of half a second for so long, whose share of waiting is drawn; each two seconds a frame comes."""
    messages: list[Message] = []
    for step in range(first, first + int(seconds / STEP_S), 4):
        steps = range(step, step + 4)
        waits = [share_of(one) for one in steps]
        busy = 0.2
        took = [busy / (1 - share) for share in waits]
        told.judge(
            steps,
            after_s=4 * STEP_S,
            step_time_s=took,
            phase__data_s=[share * time for share, time in zip(waits, took, strict=True)],
            phase__forward_s=[busy / 2] * 4,
            phase__backward_s=[busy / 2] * 4,
        )
        messages += look(told)
        if step % 40 == 1:  # the server is started again
            told.evaluator = restored(told.evaluator)
    return messages


def test_hovering_level_is_told_seldom_and_truly(told: Told) -> None:
    draws = random.Random(1)
    level = 0.33

    def share(_step: int) -> float:
        nonlocal level
        level = min(0.6, max(0.07, level + draws.gauss(0.0, 0.03) + 0.02 * (0.33 - level)))
        return min(0.9, max(0.0, draws.gauss(level, 0.1)))

    messages = play(told, 1800, share)
    for one in messages:
        assert sum(0 <= other.at - one.at < 600 for other in messages if other.alert == one.alert) <= 3
    told.now += 601
    last = {one.alert: one.event for one in messages + look(told)}
    with told.database.read() as connection:
        rows = connection.exec_driver_sql("SELECT id, state FROM alert WHERE rule = 'data_bound'").all()
    assert rows
    assert all(last.get(row[0], "resolved") == row[1] for row in rows)


def test_a_stall_is_told_within_two_windows_and_its_end_too(told: Told) -> None:
    draws, begins, ends = random.Random(3), 200, 400
    fired, over = play(
        told, 400, lambda step: draws.uniform(0.5, 0.7) if begins <= step < ends else draws.uniform(0.0, 0.05)
    )
    begin = told.now - 400
    assert (fired.alert == over.alert, fired.event, over.event) == (True, "firing", "resolved")
    assert 0 <= fired.at - begin - begins * STEP_S <= 2 * WINDOW * STEP_S
    assert 0 <= over.at - begin - ends * STEP_S <= 60 + WINDOW * STEP_S


@pytest.mark.parametrize(
    ("seconds", "share", "events"),
    [
        (600, lambda step: 0.8 if step // 40 % 2 else 0.02, ["firing"]),
        (500, lambda step: 0.4 if step % 200 < 100 else 0.6, ["firing"] * 2),
    ],
    ids=["stalls of some seconds in turn", "a critical level that fell and rose again"],
)
def test_a_level_that_swings_is_one_alert(
    told: Told, seconds: float, share: Callable[[int], float], events: list[str]
) -> None:
    assert [one.event for one in play(told, seconds, share)] == events
