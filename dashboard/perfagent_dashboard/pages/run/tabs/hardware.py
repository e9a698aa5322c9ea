"""Hardware: GPUs and hosts, by the clock, because they go on between steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dash import html

from perfagent.wire.quantities import size
from perfagent_dashboard.components.board import board
from perfagent_dashboard.components.parts import part
from perfagent_dashboard.components.tables import table
from perfagent_dashboard.pages.run.facts import RunFacts, run_path
from perfagent_dashboard.server_api import ServerApi
from perfagent_dashboard.words import keys, language, say

if TYPE_CHECKING:
    from dash.development.base_component import Component

__all__ = ["content", "is_there"]

_PREFIXES = ("gpu/", "node_gpu", "cuda/", "host/", "disk/", "process/")


def is_there(facts: RunFacts) -> bool:
    return facts.has(*_PREFIXES)


async def content(server: ServerApi, facts: RunFacts) -> list[Component]:
    events = (await server.get(run_path(facts.id, "events"), kind="gpu", limit=50))["events"]
    return [*_gpus(events), *_trouble(events), board(facts.id, sections=["device", "host"], axis="clock")]


def _gpus(events: list[dict[str, Any]]) -> list[Component]:
    """The GPUs that each rank found."""
    rows = [
        [
            str(event["rank"]), str(gpu.get("index", "")), str(gpu.get("name", "")), _bytes(gpu.get("memory_total_bytes")),
            str(event["data"].get("driver", "")),
        ]
        for event in events
        if event["data"].get("what") == "found"
        for gpu in event["data"].get("gpus") or []
        if isinstance(gpu, Mapping)
    ]  # fmt: skip
    if not rows:
        return []
    heads = [say("rank"), say("index"), say("gpu"), say("memory"), say("driver")]
    return [part(say("gpus"), table(heads, rows, empty=""))]


def _bytes(value: Any) -> str:
    return size(float(value)) if isinstance(value, (int, float)) else ""


def _trouble(events: list[dict[str, Any]]) -> list[Component]:
    """Devices that were lost, their Xid errors, and why no figures come."""
    said = []
    for event in events:
        told = event["data"]
        if told.get("what") in ("lost", "xid", "unavailable"):
            parts = [_words(told[name]) for name in ("reason", "code", "meaning") if told.get(name)]
            said.append(f"{say('rank')} {event['rank']}: {' '.join(parts)}")
    return [html.P(text, className="quiet") for text in dict.fromkeys(said)]


def _words(told: object) -> str:
    """A key of the agent's in words; what the driver says, as it is."""
    key = f"gpus_{told}"
    return say(key) if key in keys(language()) else str(told)
