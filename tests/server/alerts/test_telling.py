"""What receivers are told of an alert over its whole life: that it fires, that it is over, that it fires again."""

from __future__ import annotations

import pytest
from posting import Posts
from told import NAN, Told, heal

from perfagent_server.alerts import waits
from perfagent_server.alerts.outbox import Outbox
from perfagent_server.engine.evaluator import Evaluator
from perfagent_server.store.tables import delivery


def both(told: Told, first: int, value: float, steps: int = 1) -> None:
    """Loss and gradients have this value."""
    told.judge(range(first, first + steps), loss=[value] * steps, grad__norm=[value] * steps)


def test_an_alert_that_opens_again_for_good_is_told_again(told: Told) -> None:
    told.judge([1, 2], loss=[2.0, NAN])
    heal(told, 3)
    told.judge([63], loss=[NAN])
    assert told.due()[2] == ("firing", 1.0), "the receiver believes that all is well"
    for step in range(64, 200):
        told.judge([step], loss=[NAN])
    sent = told.deliveries()
    assert told.events() == ["firing", "resolved", "firing"]
    assert (len({row["alert"] for row in sent}), len({row["id"] for row in sent})) == (1, 3)
    assert b"in step 63" in sent[2]["body"]
    assert b"Reopened 1 time since 22:13 UTC" in sent[2]["body"]
    assert told.alerts() == [("nonfinite_loss", "firing", 63)]
    told.judge([200], loss=[NAN], after_s=waits.QUIET_S)
    heal(told, 201)
    assert told.events()[3:] == ["resolved"]


@pytest.mark.fault
def test_w03_loss_that_heals_again_and_again_is_told_thrice(told: Told) -> None:
    told.judge([1, 2], loss=[2.0, NAN])
    begin = told.now
    for first in (3, 64, 125):
        heal(told, first)
        told.judge([first + 60], loss=[NAN])
    assert told.events() == ["firing", "resolved", "firing"]
    heal(told, 186)
    assert told.events() == ["firing", "resolved", "firing", "resolved"]
    assert told.deliveries()[3]["due"] == begin + waits.QUIET_S
    told.judge([246], loss=[NAN])
    assert told.events() == ["firing", "resolved", "firing"], "what the receiver knows is true"


def test_judging_the_same_again_after_a_kill_tells_nothing_twice(told: Told) -> None:
    told.judge([1, 2], loss=[2.0, NAN])
    heal(told, 3)
    saved, at = told.evaluator.snapshot(), told.now
    for _ in range(2):
        told.evaluator, told.now = Evaluator.restore(saved, told.evaluator.plan), at
        told.judge([63], loss=[NAN])
    assert told.events() == ["firing", "resolved", "firing"]


def test_firing_again_is_not_sent_before_resolved_has_arrived(told: Told) -> None:
    told.judge([1, 2], loss=[2.0, NAN])
    heal(told, 3)
    told.judge([63], loss=[NAN])
    posts = Posts(lambda count: 500 if count <= 2 else 200)
    outbox = Outbox(told.database, clock=lambda: told.now, send=posts)
    told.now += waits.QUIET_S
    for _ in range(5):
        assert outbox.send_due() == 1, "one of them at a time"
        told.now += 10
    assert [one.json["type"] for one in posts.deliveries][:2] == ["alert.firing"] * 2
    assert posts.arrived == ["firing", "resolved", "firing"]


@pytest.mark.parametrize("first", ["together", "the gradients"])
def test_loss_and_gradients_that_fail_again_are_one_alert(told: Told, first: str) -> None:
    both(told, 1, 2.0)
    both(told, 2, NAN)
    both(told, 3, 2.0, 60)
    if first == "together":
        both(told, 63, NAN)
        assert told.alerts() == [("nonfinite_loss", "firing", 63)]
    else:
        told.judge([63], grad__norm=[NAN])
        told.judge([63], loss=[NAN])
        assert told.alerts() == [("nonfinite_loss", "resolved", 2), ("nonfinite_loss", "firing", 63)]
    both(told, 64, 2.0, 100)
    assert {state for _, state, _ in told.alerts()} == {"resolved"}


def test_muted_alert_is_told_as_it_is_when_the_mute_ends(told: Told) -> None:
    told.judge([1, 2], loss=[2.0, NAN])
    told.mute(told.id(), 3600.0)
    heal(told, 3)
    slow = {"step_time_s": [0.1] * 60}
    told.judge(range(100, 160), phase__data_s=[0.04] * 60, **slow)
    ident = told.deliveries()[-1]["alert"]
    told.database.write(lambda c: c.execute(delivery.delete().where(delivery.c.alert == ident)) and None)
    told.mute(ident, 3600.0)
    told.judge(range(160, 220), phase__data_s=[0.09] * 60, **slow)
    [row] = [row for row in told.deliveries() if row["alert"] == ident]
    told.judge(range(220, 280), phase__data_s=[0.045] * 60, after_s=61.0, **slow)
    [newer] = [row for row in told.deliveries() if row["alert"] == ident]
    assert (newer["id"], newer["tries"]) == (row["id"], 0)
    assert newer["due"] > told.now
    assert newer["body"] != row["body"]
