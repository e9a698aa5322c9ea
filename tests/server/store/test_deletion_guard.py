"""The guard stops deletions after the wall clock jumped. The tests drive both clocks by hand. test_retention_by_project.py tests
the deletions themselves."""

from __future__ import annotations

import pytest

from perfagent_server.store.retention import DAY_S
from perfagent_server.store.retention.deletion_guard import DeletionGuard


class Clocks:
    """The wall clock and the one that nobody sets."""

    now, up = 1e9, 1000.0

    def __init__(self) -> None:
        self.guard = DeletionGuard(clock=lambda: self.now, uptime=lambda: self.up)

    def pass_by(self, seconds: float) -> Clocks:
        self.now += seconds
        self.up += seconds
        return self

    def doubt(self, trusted: float | None = None) -> str:
        return self.guard.distrust(self.now, trusted) or ""


@pytest.mark.parametrize("jump", [601.0, -601.0, 365 * DAY_S])
def test_a_jump_is_doubted_until_it_is_mended_or_a_week_old(jump: float) -> None:
    clocks = Clocks()
    clocks.now += jump
    assert f"jumped by {jump:+.0f} s" in clocks.pass_by(DAY_S).doubt()
    assert "jumped" in clocks.pass_by(6 * DAY_S - 1).doubt()
    assert clocks.pass_by(1).doubt() == ""  # so long: that is the right time
    clocks.now += jump
    assert "jumped" in clocks.doubt()
    clocks.now -= jump
    assert clocks.doubt() == ""
    clocks.now += 600
    assert clocks.doubt() == ""


def test_a_start_a_day_behind_the_last_trust_waits_a_day() -> None:
    clocks = Clocks()
    trusted = clocks.now - 400 * DAY_S
    assert "400 days ahead" in clocks.doubt(trusted)
    assert "in 1 h" in clocks.pass_by(DAY_S - 3600).doubt(trusted)
    assert clocks.pass_by(3600).doubt(trusted) == ""
    clocks = Clocks()
    assert clocks.doubt(clocks.now - DAY_S) == clocks.doubt(clocks.now) == clocks.doubt(None) == ""
    assert "ahead" in clocks.doubt(clocks.now - DAY_S - 1)


def test_two_weeks_without_a_run_are_doubted() -> None:
    assert DeletionGuard.is_quiet(14 * DAY_S, 0.0) is None
    assert "for 15 days" in (DeletionGuard.is_quiet(15 * DAY_S, 0.0) or "")


def test_most_runs_go_at_once_only_after_a_day() -> None:
    clocks = Clocks()
    assert clocks.guard.too_many(19, 19) is clocks.guard.too_many(20, 40) is None
    assert "21 of 40" in (clocks.guard.too_many(21, 40) or "")
    assert clocks.pass_by(DAY_S - 1).guard.too_many(20, 20)
    assert clocks.pass_by(1).guard.too_many(20, 20) is None
    assert clocks.guard.too_many(1, 40) is None
    assert clocks.guard.too_many(21, 40), "a day from the first of them"
