"""What a finding costs an hour: its share of the time, at what an hour of the run costs. Pure."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TypeVar

from perfagent.wire import Alert, Finding
from perfagent.wire.quantities import spell_money
from perfagent_server.spending.run_cost import Rate

__all__ = ["lost_share", "with_money"]

Costly = TypeVar("Costly", Finding, Alert)

_LOSES_ALL = frozenset(("hang", "rank_absent", "nonfinite_loss", "loss_divergence", "frozen_training"))
"""While one of these goes on, the run gets nowhere."""


def lost_share(finding: Finding | Alert) -> float | None:
    """The part of the run's time that the finding takes; None where that is not known."""
    if finding.rule in _LOSES_ALL and finding.severity != "info":
        return 1.0
    if finding.gain_pct is None:
        return None
    # the share itself, where the rule promises that only a part of it can be gained
    share = finding.evidence.get("share_pct")
    is_known = isinstance(share, (int, float)) and not isinstance(share, bool) and 0 <= share <= 100
    told = float(share) if is_known else finding.gain_pct  # type: ignore[arg-type]
    return min(max(told / 100, 0.0), 1.0) if math.isfinite(told) else None


def with_money(finding: Costly, rate: Rate | None) -> Costly:
    """The finding with what it costs an hour, where that is known."""
    share = None if rate is None else lost_share(finding)
    if rate is None or not share:
        return finding
    money = share * rate.per_hour
    words = f"{spell_money(money, rate.currency)} an hour"
    cost = f"{finding.cost}: {words}" if finding.cost else words
    return replace(finding, cost=cost, money_per_hour=money, currency=rate.currency)
