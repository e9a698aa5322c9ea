"""Buttons that ask the processes of a run for something."""

from __future__ import annotations

from dash import html
from dash.development.base_component import Component

from perfagent_dashboard.pages.run.facts import RunFacts
from perfagent_dashboard.words import say

__all__ = ["ask_button"]


def ask_button(facts: RunFacts, kind: str, at: str) -> Component | None:
    """kind: stacks or profile. None where nobody would answer, or the viewer may not ask: the run has ended, only a script
    reports, or the viewer reads only. at: where on the page it stands."""
    if facts.has_ended or "operate" not in facts.may or not facts.run["host"]:
        return None
    return html.Button(say(f"take_{kind}"), id={"command": kind, "at": at}, type="button", className="button")
