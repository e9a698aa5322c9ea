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
    """is_there: whether the run has something for it. content: asks the server for more than the facts; None, where the tab
    is a board of charts, which keeps itself fresh. count: a number beside its name, "" for none. marks: what the names of
    series begin with whose alerts set a mark at the tab; rules: whose alerts set it here, and at no other.
    title: where it varies; is_kept: a callback of its own keeps it fresh."""

    name: str
    is_there: Callable[[RunFacts], bool]
    content: Callable[[ServerApi, RunFacts], Awaitable[list[Component]]]
    count: Callable[[RunFacts], str] = lambda _facts: ""
    marks: tuple[str, ...] = ()
    rules: tuple[str, ...] = ()
    title: Callable[[RunFacts], str] | None = None
    is_kept: bool = False


TABS = (
    Tab("charts", charts.is_there, charts.content, marks=("loss", "grad/", "lr", "update/", "dead/", "amp/")),
    Tab(
        "time",
        time.is_there,
        time.content,
        marks=("step_time_s", "phase/", "tokens_per_s", "samples_per_s", "mfu", "compile/"),
    ),
    Tab("memory", memory.is_there, memory.content, marks=("memory/", "cuda/", "gpu/memory", "process/rss")),
    Tab("hardware", hardware.is_there, hardware.content, marks=("gpu/", "host/", "disk/")),
    Tab("layers", layers.is_there, layers.content),
    Tab("media", media.is_there, media.content, is_kept=True),
    Tab("ranks", ranks.is_there, ranks.content, count=ranks.count, rules=ranks.RULES, title=ranks.title),
    Tab("console", console.is_there, console.content),
    Tab("config", config.is_there, config.content),
    Tab("alerts", alerts.is_there, alerts.content, count=alerts.count),
)
