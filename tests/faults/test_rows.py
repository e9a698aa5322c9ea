"""The rows of the fault matrix in their short form: a few kills and seconds. scripts/faults runs the long one."""

from __future__ import annotations

from pathlib import Path

import pytest
from faults import alert_rows, rows

pytestmark = [pytest.mark.fault, pytest.mark.real]


def test_s01_server_killed_under_load_stores_points_once(tmp_path: Path) -> None:
    outcome = rows.server_killed_under_load(tmp_path, kills=2, agents=2)
    assert outcome.good, outcome


def test_w02_nan_acked_before_the_server_died_is_told_once(tmp_path: Path) -> None:
    outcome = alert_rows.killed_between_ack_and_judgment(tmp_path, trials=1)
    assert outcome.good, outcome


def test_w01_failing_receiver_gets_each_alert_under_one_id(tmp_path: Path) -> None:
    outcome = alert_rows.receiver_fails_and_server_dies(tmp_path, alerts=4, kills=1, within_s=90.0)
    assert outcome.good, outcome


def test_w02_server_killed_in_a_delivery_tells_under_one_id(tmp_path: Path) -> None:
    outcome = alert_rows.killed_at_four_points(tmp_path, kills=1)
    assert outcome.good, outcome


def test_w03_nan_on_many_ranks_is_one_notification(tmp_path: Path) -> None:
    outcome = alert_rows.many_ranks_at_once(tmp_path, ranks=64)
    assert outcome.good, outcome


def test_w04_alerts_of_three_days_arrive_at_last(tmp_path: Path) -> None:
    outcome = alert_rows.receiver_away(tmp_path, alerts=10)
    assert outcome.good, outcome
