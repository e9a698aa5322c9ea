"""The tabs of a run's page. Each is one file: whether the run has something for it, and its content."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from dash.development.base_component import Component

from perfagent_dashboard.pages.run.facts import RunFacts
from perfagent_dashboard.pages.run.tabs import (
    alerts,
    charts,
    config,
    console,
    hardware,
    layers,
    media,
    memory,
    ranks,
    time,
)
from perfagent_dashboard.server_api import ServerApi

__all__ = ["TABS", "Tab"]


@dataclass(frozen=True, slots=True)
class Tab:
    """content: asks the server for more than the facts. is_there: whether the run has something for it. count: a number beside
    its name, "" for none. marks: what the names of
    series begin with whose alerts set a mark at the tab; rules: whose alerts set it here, and at no other.
    title: where it varies; is_kept: a callback of its own keeps it fresh."""

    name: str
    content: Callable[[ServerApi, RunFacts], Awaitable[list[Component]]]
    is_there: Callable[[RunFacts], bool] = lambda _facts: True
    count: Callable[[RunFacts], str] = lambda _facts: ""
    marks: tuple[str, ...] = ()
    rules: tuple[str, ...] = ()
    title: Callable[[RunFacts], str] | None = None
    is_kept: bool = False


TABS = (
    Tab("charts", charts.content, marks=("loss", "grad/", "lr", "update/", "dead/", "amp/")),
    Tab(
        "time", time.content, time.is_there,
        marks=("step_time_s", "phase/", "tokens_per_s", "samples_per_s", "mfu", "compile/"),
    ),
    Tab("memory", memory.content, memory.is_there, marks=("memory/", "cuda/", "gpu/memory", "process/rss")),
    Tab("hardware", hardware.content, hardware.is_there, marks=("gpu/", "host/", "disk/")),
    Tab("layers", layers.content, lambda facts: bool(facts.families)),
    Tab("media", media.content, lambda facts: bool(facts.run.get("media")), is_kept=True),
    Tab("ranks", ranks.content, ranks.is_there, ranks.count, rules=ranks.RULES, title=ranks.title),
    Tab("console", console.content),
    Tab("config", config.content, lambda facts: bool(facts.run["config"] or facts.run["meta"])),
    Tab("alerts", alerts.content, lambda facts: bool(facts.alerts), alerts.count),
)  # fmt: skip
