"""The agent's budget, driven by hand."""

from __future__ import annotations

import pytest

from perfagent.cost import telling_ns
from perfagent.governor import Governor


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_gradients_are_measured_as_often_as_the_budget_allows():
    governor = Governor(0.5, Clock())
    assert governor.period(pass_ns=1_000, step_ns=1_000_000_000) == 1
    assert governor.period(pass_ns=1_400_000, step_ns=25_000_000) == 12  # 1.4 ms in 0.5 % of 25 ms
    assert governor.period(pass_ns=10**9, step_ns=1_000) == 1000, "however dear, they are looked at"


def test_what_the_threads_take_is_not_there_for_gradients():
    clock = Clock()
    governor = Governor(0.5, clock)
    before = governor.period(1_000_000, 100_000_000)
    clock.now = 10.0
    share = governor.report(own_ns=10_000_000, pass_ns=0, threads_s=0.03)
    assert share == pytest.approx(0.4)
    assert governor.period(1_000_000, 100_000_000) > before


def test_a_tenth_of_the_budget_is_left_for_gradients_where_the_rest_takes_all():
    clock = Clock()
    governor = Governor(0.5, clock)
    clock.now = 10.0
    assert governor.report(own_ns=500_000_000, pass_ns=0, threads_s=0.5) == pytest.approx(10.0)
    assert governor.period(pass_ns=400_000, step_ns=6_400_000) == 125, "0.05 % of 6.4 ms: 3.2 µs a step"


def test_passes_count_as_overhead_but_not_against_themselves():
    clock = Clock()
    governor = Governor(0.5, clock)
    before = governor.period(1_000_000, 100_000_000)
    clock.now = 2.0
    assert governor.report(own_ns=100_000_000, pass_ns=100_000_000, threads_s=0.0) == pytest.approx(5.0)
    assert governor.period(1_000_000, 100_000_000) == before


def test_a_report_covers_at_least_a_second():
    clock = Clock()
    governor = Governor(0.5, clock)
    clock.now = 0.9
    assert governor.report(1, 0, 0.0) is None


def test_telling_of_a_pass_is_charged_to_it_and_grows_with_its_layers():
    few, many = telling_ns(7), telling_ns(306)
    assert 10_000 < few < many < 100_000_000
    governor = Governor(0.5, Clock())
    assert governor.period(70_000 + few, 12_000_000) > governor.period(70_000, 12_000_000)


def test_what_was_estimated_of_passes_never_makes_a_budget_larger():
    clock = Clock()
    governor = Governor(0.5, clock)
    before = governor.period(1_000_000, 100_000_000)
    clock.now = 2.0
    governor.report(own_ns=0.0, pass_ns=1e12, threads_s=0.0)
    assert governor.period(1_000_000, 100_000_000) == before
