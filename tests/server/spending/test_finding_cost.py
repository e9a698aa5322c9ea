"""What a finding costs an hour."""

from __future__ import annotations

import pytest

from perfagent.wire import Finding, Severity
from perfagent.wire.quantities import spell_money
from perfagent_server.spending.finding_cost import lost_share, with_money
from perfagent_server.spending.run_cost import Rate

EUR = Rate(per_hour=10.0, currency="EUR")


def finding(
    rule: str, severity: Severity = "warning", *, cost: str = "", gain: float | None = None, **evidence: object
) -> Finding:
    return Finding(rule=rule, severity=severity, message="...", cost=cost, gain_pct=gain, evidence=evidence)


def test_wait_costs_its_share_of_the_runs_hour() -> None:
    told = with_money(finding("data_bound", cost="0.31 s of each step of 1 s", gain=31.0, share_pct=31.0), EUR)
    assert (told.money_per_hour, told.currency) == (pytest.approx(3.1), "EUR")
    assert told.cost == "0.31 s of each step of 1 s: 3.10 EUR an hour"


def test_what_can_be_gained_only_in_part_costs_all_of_its_share() -> None:
    assert lost_share(finding("checkpoint_bound", gain=10.0, share_pct=20.0)) == pytest.approx(0.2)


@pytest.mark.parametrize("rule", ["hang", "nonfinite_loss", "loss_divergence"])
def test_a_run_that_gets_nowhere_loses_all_of_it(rule: str) -> None:
    assert with_money(finding(rule, "critical"), EUR).money_per_hour == pytest.approx(10.0)


@pytest.mark.parametrize(
    "found", [finding("loss_spike"), finding("healthy", "info"), finding("unchanged_tensor", share_pct=40.0)]
)
def test_what_takes_no_time_has_no_cost(found: Finding) -> None:
    assert with_money(found, EUR) is found
    assert with_money(finding("data_bound", gain=31.0), None).money_per_hour is None, "without a price"


def test_money_is_told_with_the_digits_that_say_something() -> None:
    amounts = [1234.5, 0.1, 0.0, 0.0042, 1e-6]
    words = ["1,234.50 EUR", "0.10 EUR", "0.00 EUR", "0.0042 EUR", "under 0.0001 EUR"]
    assert [spell_money(amount, "EUR") for amount in amounts] == words


@pytest.mark.parametrize("share", [float("nan"), True, "a lot", -3.0, 5000.0, 10**400])
def test_a_share_that_cannot_be_is_not_counted(share: object) -> None:
    assert lost_share(finding("data_bound", gain=25.0, share_pct=share)) == pytest.approx(0.25)
