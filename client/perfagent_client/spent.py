"""What a run has taken, in amounts that a person reads. Pure."""

from __future__ import annotations

from perfagent.money import spell_money
from perfagent.wire import Spent

__all__ = ["amounts", "money"]


def amounts(spent: Spent) -> list[str]:
    """`3.2 GPU hours`, `1.1 kWh`, `0.4 J a token`: what is known of it, but for money."""
    known = (
        (spent.gpu_hours, "GPU hours"), (spent.cpu_core_hours, "CPU core hours"), (spent.gpu_energy_kwh, "kWh"),
        (spent.gpu_energy_per_token_j, "J a token"),
    )  # fmt: skip
    return [f"{value:,.3g} {unit}" for value, unit in known if value is not None]


def money(spent: Spent) -> str:
    """`9.80 EUR, 3.10 EUR an hour`; "" without a price."""
    if spent.money is None:
        return ""
    rate = "" if spent.money_per_hour is None else f", {spell_money(spent.money_per_hour, spent.currency)} an hour"
    return spell_money(spent.money, spent.currency) + rate
