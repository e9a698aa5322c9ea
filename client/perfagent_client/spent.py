"""What a run has taken, in amounts that a person reads. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from perfagent.wire import Spent
from perfagent.wire.quantities import spell_money
from perfagent_client.models import RunDetails

__all__ = ["UNITS", "amounts", "money", "paused_s", "took_s"]

UNITS = {
    "gpu_hours": "GPU hours", "cpu_core_hours": "CPU core hours", "gpu_energy_kwh": "kWh",
    "gpu_energy_per_token_j": "J a token",
}  # fmt: skip
"""Fields of `Spent` -> what their values count."""


def took_s(run: RunDetails) -> float:
    """How long it trained: of several attempts their sum, without the time between them."""
    return _whole_s(run) - paused_s(run)


def paused_s(run: RunDetails) -> float:
    """How long no attempt ran between the first and the last."""
    return max(0.0, _whole_s(run) - 3600 * run.spent.hours) if run.attempts > 1 and run.spent.hours else 0.0


def _whole_s(run: RunDetails) -> float:
    try:
        began, last = (datetime.fromisoformat(moment) for moment in (run.started, run.ended or run.updated))
    except (ValueError, TypeError):
        return 0.0
    return max(0.0, (last - began).total_seconds())


def amounts(spent: Spent, units: Mapping[str, str] = UNITS) -> list[str]:
    """`3.2 GPU hours`, `1.1 kWh`, `0.4 J a token`: what is known of it, but for money."""
    known = {unit: getattr(spent, name) for name, unit in units.items()}
    return [f"{value:,.3g} {unit}" for unit, value in known.items() if value is not None]


def money(spent: Spent, an_hour: str = "an hour") -> str:
    """`9.80 EUR, 3.10 EUR an hour`; "" without a price."""
    if spent.money is None:
        return ""
    rate = "" if spent.money_per_hour is None else f", {spell_money(spent.money_per_hour, spent.currency)} {an_hour}"
    return spell_money(spent.money, spent.currency) + rate
