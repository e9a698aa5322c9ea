"""The agent's budget, driven by hand."""

from __future__ import annotations

import pytest
import torch

from perfagent.governor import Governor
from perfagent.step.costs import telling_ns
from perfagent.step.state import state


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


def test_how_long_steps_take_is_known_from_one_report_with_a_step_to_the_next():
    clock = Clock()
    governor = Governor(0.5, clock)
    reports = ((10.0, 500, 0.0), (12.0, 504, 0.5), (14.0, 504, 0.5), (18.0, 506, 3.0), (19.0, 506, 3.0))
    for clock.now, completed, step_s in reports:
        governor.report(0.0, 0.0, 0.0, completed)
        assert governor.step_ns == step_s * 1e9


@pytest.mark.parametrize("longer", [True, False])
def test_where_steps_become_longer_the_next_look_at_gradients_comes_sooner(record, longer):
    """Planned at steps of 0.3 ms it is a thousand steps away, and a thousand steps of half a second are eight minutes.
    A look that costs as much as many such steps is as far away as it was."""
    model = torch.nn.Linear(4, 2)
    recorded = record(model)
    # the collector's counts, by which the cost is told
    recorded.sender.logged, recorded.sender.stepped = (0, 0, 0, 0), (0, 0)
    optimizer, clock = torch.optim.SGD(model.parameters(), lr=0.1), Clock()
    p = state.current
    clock.now, p.governor.clock = p.governor.clock(), clock

    def steps(seconds_each):
        for _ in range(10):
            model(torch.ones(3, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        clock.now += 10 * seconds_each
        recorded.run._poll()

    steps(60.0)
    p.measure_at = planned = p.completed + 1000
    if not longer:
        p.health._planned_ns = 1e15
    steps(60.0)
    assert p.measure_at > p.completed + 1, "never in the step in progress"
    assert (p.measure_at < p.completed + 20) == longer
    assert (p.measure_at == planned) != longer


def test_each_report_is_of_the_time_since_the_one_before():
    clock = Clock()
    governor = Governor(0.5, clock)
    for clock.now in (10.0, 20.0, 30.0):
        share = governor.report(own_ns=clock.now * 3e6, pass_ns=clock.now * 2e6, threads_s=clock.now * 1e-3)
        assert share == pytest.approx(0.4)
        assert governor.period(pass_ns=1_200_000, step_ns=100_000_000) == 4, (
            "0.3 % are left of the budget: 0.3 ms a step"
        )
    clock.now = 30.5
    assert governor.report(1e9, 0, 1.0) is None, "too early again"


def test_while_nobody_knows_how_long_a_step_takes_each_may_be_measured():
    assert Governor(0.5, Clock()).period(pass_ns=1_000_000, step_ns=0) == 1


@pytest.mark.parametrize("totals", [(0.0, 0.4), (10_000_000.0, 0.1), (0.0, 0.0)])
def test_a_share_is_never_negative(totals):
    """A thread that is replaced takes its count along, and so does what looked at batches when the run ends."""
    clock = Clock()
    governor = Governor(0.5, clock)
    clock.now = 2.0
    governor.report(own_ns=20_000_000.0, pass_ns=0.0, threads_s=0.3)
    clock.now = 4.0
    own_ns, threads_s = totals
    share = governor.report(own_ns=own_ns, pass_ns=0.0, threads_s=threads_s)
    assert share == pytest.approx(100 * max(0.0, threads_s - 0.3) / 2)
