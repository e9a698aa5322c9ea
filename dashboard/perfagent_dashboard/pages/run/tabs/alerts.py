"""Alerts of the run, the open ones first, and how the run ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

from perfagent_dashboard.components.alert_card import alert_card
from perfagent_dashboard.components.feedback import nothing
from perfagent_dashboard.pages.run.facts import RunFacts
from perfagent_dashboard.server_api import ServerApi
from perfagent_dashboard.words import say

if TYPE_CHECKING:
    from dash.development.base_component import Component

__all__ = ["content", "count"]

_MOST = 100


def count(facts: RunFacts) -> str:
    return str(len(facts.firing)) if facts.firing else ""


async def content(_server: ServerApi, facts: RunFacts) -> list[Component]:
    ordered = sorted(facts.alerts, key=lambda alert: alert["state"] != "firing")
    cards = [alert_card(dict(alert), may_act="operate" in facts.may) for alert in ordered[:_MOST]]
    return cards or [nothing(say("alerts_none"))]
