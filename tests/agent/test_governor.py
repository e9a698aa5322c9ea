"""The agent's budget, driven by hand."""

from __future__ import annotations

import pytest
from clocks import Clock

from perfagent.step.costs import report_ns
from perfagent.step.governor import Governor


@pytest.fixture
def clock() -> Clock:
    return Clock(0.0)


@pytest.fixture
def governor(clock: Clock) -> Governor:
    return Governor(0.5, clock)


def test_gradients_are_measured_as_often_as_the_budget_allows(governor):
    assert governor.period(pass_ns=1_000_000, step_ns=0) == 1, "nobody knows how long a step takes"
    assert governor.period(pass_ns=1_000, step_ns=1_000_000_000) == 1
    assert governor.period(pass_ns=1_400_000, step_ns=25_000_000) == 12  # 1.4 ms in 0.5 % of 25 ms
    assert governor.period(pass_ns=10**9, step_ns=1_000) == 1000, "however dear, they are looked at"


def test_what_the_threads_take_is_not_there_for_gradients(governor, clock):
    clock.at = 0.9
    assert governor.report(1, 0, 0.0) is None, "a report covers at least a second"
    before = governor.period(1_000_000, 100_000_000)
    clock.at = 10.0
    assert governor.report(own_ns=10_000_000, pass_ns=0, threads_s=0.03) == pytest.approx(0.4)
    assert governor.period(1_000_000, 100_000_000) > before
    clock.at = 20.0
    assert governor.report(own_ns=500_000_000, pass_ns=0, threads_s=0.5) == pytest.approx(9.6)
    assert governor.period(pass_ns=400_000, step_ns=6_400_000) == 125, "a tenth of the budget is left in any case"


def test_passes_count_as_overhead_but_not_against_themselves(governor, clock):
    before = governor.period(1_000_000, 100_000_000)
    for clock.at, own_ns, pass_ns, share in ((2.0, 1e8, 1e8, 5.0), (4.0, 0.0, 1e12, 0.0)):
        assert governor.report(own_ns=own_ns, pass_ns=pass_ns, threads_s=0.0) == pytest.approx(share)
        assert governor.period(1_000_000, 100_000_000) == before
    few, many = report_ns(7), report_ns(306)  # reporting a pass is charged to it by its layers
    assert 10_000 < few < many < 100_000_000
    assert governor.period(70_000 + few, 12_000_000) > governor.period(70_000, 12_000_000)


def test_length_of_steps_is_known_from_one_report_to_the_next(governor, clock):
    reports = ((10.0, 500, 0.0), (12.0, 504, 0.5), (14.0, 504, 0.5), (18.0, 506, 3.0), (19.0, 506, 3.0))
    for clock.at, completed, step_s in reports:
        governor.report(0.0, 0.0, 0.0, completed)
        assert governor.step_ns == step_s * 1e9
