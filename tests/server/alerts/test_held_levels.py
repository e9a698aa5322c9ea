"""What receivers are told of an alert about a level that jumps around its threshold: little, in time, and at last the
truth."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from judging import restored
from told import Told

from perfagent_server.alerts.batches import what_is_due

STEP_S = 0.5
WINDOW = 20  # steps of data_bound


@pytest.fixture
def told(tmp_path: Path) -> Iterator[Told]:
    made = Told(tmp_path)
    yield made
    made.database.close()


class Receiver:
    """Gets at once whatever is due. messages: time, event and severity of each."""

    def __init__(self, told: Told) -> None:
        self.told = told
        self.messages: list[tuple[float, str, str]] = []

    def look(self) -> None:
        told = self.told
        with told.database.read() as connection:
            due = what_is_due(connection, told.now, {})
        for batch in due.batches:
            for row in batch.rows:
                about = json.loads(row["body"])["data"]["alert"]
                if about["rule"] == "data_bound":
                    self.messages.append((told.now, row["alert"], row["event"].removeprefix("alert.")))
        told.deliver([row["id"] for batch in due.batches for row in batch.rows])


def play(told: Told, seconds: float, share_of: Callable[[int], float], *, first: int = 1) -> Receiver:
    """Steps of half a second for so long, whose share of waiting is drawn; each two seconds a frame comes."""
    receiver = Receiver(told)
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
        receiver.look()
        if step % 40 == 1:  # the server is started again
            told.evaluator = restored(told.evaluator)
    return receiver


def most_in_ten_minutes(receiver: Receiver) -> int:
    times: dict[str, list[float]] = {}
    for at, alert, _ in receiver.messages:
        times.setdefault(alert, []).append(at)
    return max((sum(0 <= other - at < 600 for other in row) for row in times.values() for at in row), default=0)


def test_a_heavy_tail_above_a_small_median_raises_no_alert(told: Told) -> None:
    draws = random.Random(7)

    def share(step: int) -> float:
        return 0.6 if draws.random() < 0.2 else draws.uniform(0.05, 0.09)

    receiver = play(told, 600, share)
    assert [alert for alert in told.alerts() if alert[0] == "data_bound"] == []
    assert receiver.messages == []


def test_a_level_that_hovers_for_half_an_hour_is_told_seldom_and_truly(told: Told) -> None:
    draws = random.Random(1)
    level = 0.1

    def share(step: int) -> float:
        nonlocal level
        level = min(0.3, max(0.02, level + draws.gauss(0.0, 0.01) + 0.02 * (0.1 - level)))
        return min(0.9, max(0.0, draws.gauss(level, 0.03)))

    receiver = play(told, 1800, share)
    assert most_in_ten_minutes(receiver) <= 3
    told.now += 601
    receiver.look()
    last = {alert: event for _, alert, event in receiver.messages}
    with told.database.read() as connection:
        rows = connection.exec_driver_sql("SELECT id, state FROM alert WHERE rule = 'data_bound'").all()
    assert rows
    assert all(last.get(row[0], "resolved") == row[1] for row in rows)


def test_a_stall_is_told_within_two_windows_and_its_end_too(told: Told) -> None:
    draws, begins, ends = random.Random(3), 200, 400

    def share(step: int) -> float:
        return draws.uniform(0.5, 0.7) if begins <= step < ends else draws.uniform(0.0, 0.05)

    receiver = play(told, 400, share)
    begin = told.now - 400
    [(fired, one, firing), (resolved, other, over)] = receiver.messages
    assert (one == other, firing, over) == (True, "firing", "resolved")
    assert 0 <= fired - begin - begins * STEP_S <= 2 * WINDOW * STEP_S
    assert 0 <= resolved - begin - ends * STEP_S <= 60 + WINDOW * STEP_S


def test_stalls_of_some_seconds_in_turn_are_one_alert(told: Told) -> None:
    def share(step: int) -> float:
        return 0.8 if step // 40 % 2 else 0.02

    receiver = play(told, 600, share)
    assert [event for _, _, event in receiver.messages] == ["firing"]


def test_a_critical_level_that_fell_and_rose_again_is_told_once_for_an_opening(told: Told) -> None:
    def share(step: int) -> float:
        return 0.15 if step % 200 < 100 else 0.4

    receiver = play(told, 500, share)
    assert [event for _, _, event in receiver.messages] == ["firing", "firing"]


def test_what_was_not_sent_is_summed_up_in_the_next_message(told: Told) -> None:
    receiver = play(told, 620, lambda step: 0.15 if step % 400 < 200 else 0.0)
    assert [event for _, _, event in receiver.messages][:2] == ["firing", "resolved"]
    play(told, 400, lambda _: 0.15, first=1241)
    said = [json.loads(row["body"])["data"]["alert"] for row in told.deliveries() if b"Reopened" in row["body"]]
    [again] = [alert for alert in said if alert["rule"] == "data_bound"]
    assert "Reopened 3 times since 22:16 UTC." in again["message"]
