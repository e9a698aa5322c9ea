"""Charts: what training is about, its losses first; speed and devices have tabs of their own. assets/charts fills the board
and keeps it live."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dash import html

from perfagent_dashboard.components.board import board
from perfagent_dashboard.components.feedback import nothing
from perfagent_dashboard.pages.run.facts import RunFacts
from perfagent_dashboard.server_api import ServerApi
from perfagent_dashboard.words import say

if TYPE_CHECKING:
    from dash.development.base_component import Component

__all__ = ["content"]


async def content(_server: ServerApi, facts: RunFacts) -> list[Component]:
    shown = board(facts.id, sections=["pinned", "own", "training", "logged"])
    return [shown if facts.names else html.Div(nothing(say("no_charts")))]
