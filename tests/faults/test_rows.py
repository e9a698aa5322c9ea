"""The rows of the fault matrix in their short form: a few kills and seconds. scripts/faults runs the long one."""

from __future__ import annotations

from pathlib import Path

import pytest
from faults import alert_rows, rows

pytestmark = pytest.mark.fault


def test_s01_a_server_killed_under_load_stores_every_point_once(tmp_path: Path) -> None:
    outcome = rows.server_killed_under_load(tmp_path, kills=2, agents=2)
    assert outcome.good, outcome


def test_a02_a_stopped_server_stalls_neither_training_nor_exit(tmp_path: Path) -> None:
    for number in range(5):  # the quickest end of five: what runs beside this test takes its time, too
        # the stall itself is a measurement: scripts/faults judges it, on a machine that does nothing else
        _, left = rows.server_stopped(tmp_path / str(number), seconds=1.0)
        assert left.figures.endswith("exit code 0"), left
        if left.good:
            break
    assert left.good, left


def test_w02_a_nan_that_was_acked_before_the_server_died_is_told_once(tmp_path: Path) -> None:
    outcome = alert_rows.killed_between_ack_and_judgment(tmp_path, trials=1)
    assert outcome.good, outcome


def test_w01_a_failing_receiver_gets_every_alert_under_one_id(tmp_path: Path) -> None:
    outcome = alert_rows.receiver_fails_and_server_dies(tmp_path, alerts=4, kills=1, within_s=90.0)
    assert outcome.good, outcome


def test_w02_a_server_killed_at_any_point_of_a_delivery_tells_each_alert_under_one_id(tmp_path: Path) -> None:
    outcome = alert_rows.killed_at_four_points(tmp_path, kills=1)
    assert outcome.good, outcome


def test_w03_a_nan_on_many_ranks_is_one_notification(tmp_path: Path) -> None:
    outcome = alert_rows.many_ranks_at_once(tmp_path, ranks=64)
    assert outcome.good, outcome


def test_w04_alerts_of_three_days_arrive_when_the_receiver_is_back(tmp_path: Path) -> None:
    outcome = alert_rows.receiver_away(tmp_path, alerts=10)
    assert outcome.good, outcome
