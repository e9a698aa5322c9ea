"""Memory: what takes it, how it grew, and whether it will last."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dash import html

from perfagent.wire.quantities import size
from perfagent_dashboard.components.board import board
from perfagent_dashboard.components.marks import severity_mark
from perfagent_dashboard.components.numbers import percent
from perfagent_dashboard.components.parts import part
from perfagent_dashboard.components.prose import prose
from perfagent_dashboard.components.tables import table
from perfagent_dashboard.pages.run.facts import RunFacts, run_path
from perfagent_dashboard.pages.run.verdict import tone_of
from perfagent_dashboard.server_api import ServerApi
from perfagent_dashboard.words import say

if TYPE_CHECKING:
    from dash.development.base_component import Component

__all__ = ["content", "is_there"]

_PREFIXES = ("memory/", "cuda/", "gpu/memory", "process/rss", "host/memory")
_PARTS = ("parameters", "gradients", "optimizer_state", "activations_and_other", "offloaded")
_RULES = {
    "oom_observed", "oom_imminent", "gpu_memory_leak", "host_memory_leak", "gpu_fragmentation", "rank_memory_imbalance",
    "allocator_churn",
}  # fmt: skip
_EDGES = ("_total_bytes", "_min_bytes", "_max_bytes")


def is_there(facts: RunFacts) -> bool:
    return facts.has(*_PREFIXES)


async def content(server: ServerApi, facts: RunFacts) -> list[Component]:
    events = (await server.get(run_path(facts.id, "events"), kind="memory", limit=1))["events"]
    told = events[-1]["data"] if events else {}
    charted = [name for name in facts.names if name.startswith(_PREFIXES) and not name.endswith(_EDGES)]
    return [*_forecast(facts), *_breakdown(facts, told), *_groups(told), board(facts.id, names=charted)]


def _forecast(facts: RunFacts) -> list[Component]:
    """What the rules on memory say now."""
    said = [one for one in (facts.verdict, *facts.findings) if one["rule"] in _RULES]
    unique = {one["rule"]: one for one in said}.values()
    return [html.P([severity_mark(tone_of(one)), " ", *prose(one["message"])], className="card said") for one in unique]


def _breakdown(facts: RunFacts, told: Mapping[str, Any]) -> list[Component]:
    """The parts of the training's memory as one bar, against the device's limit where that is known."""
    parts = {name: float(told[name]) for name in _PARTS if isinstance(told.get(name), (int, float)) and told[name] > 0}
    if not parts:
        return []
    limit = facts.newest("gpu/memory_total_bytes") or 0.0
    free = max(0.0, limit - sum(parts.values()))
    whole = free + sum(parts.values())
    segments = [
        html.I(title=f"{say(f'memory_{name}')} {size(value)}", className=f"memory-{name}", style={"flexGrow": value})
        for name, value in parts.items()
    ]
    if free:
        segments.append(html.I(title=say("memory_free"), className="memory-free", style={"flexGrow": free}))
    rows = []
    for name, value in parts.items():
        named = html.Span([html.I(className=f"swatch memory-{name}"), say(f"memory_{name}")])
        rows.append([named, size(value), f"{percent(value / whole)} %"])
    if limit:
        rows.append([html.B(say("memory_limit")), size(limit), ""])
    heads = [say("part"), say("size"), say("share_of_limit" if limit else "share_of_all")]
    return [part(say("memory_of"), html.Div(segments, className="segments tall"), table(heads, rows, empty=""))]


def _groups(told: Mapping[str, Any]) -> list[Component]:
    """The same of each parameter group of the optimizer."""
    groups = [one for one in told.get("groups") or [] if isinstance(one, Mapping)]
    if len(groups) < 2:
        return []
    rows = [
        [
            str(one.get("name") or place), f"{one.get('numbers', 0):,}", _rate(one.get("lr")),
            *(size(float(one[name])) if isinstance(one.get(name), (int, float)) else "" for name in _PARTS[:3]),
        ]
        for place, one in enumerate(groups)
    ]  # fmt: skip
    heads = ["parameter_group", "numbers", "learning_rate", *(f"memory_{name}" for name in _PARTS[:3])]
    return [part(say("parameter_groups"), table([*map(say, heads)], rows, empty=""))]


def _rate(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, (int, float)) else ""
