"""Six figures of a run over one named window. They are the server's own figures, never read from the charts, which may show
a part of the run."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dash import html
from dash.development.base_component import Component

from perfagent_dashboard.components.attributes import hyphenated
from perfagent_dashboard.components.numbers import number, percent, quantity, si
from perfagent_dashboard.pages.run.facts import RunFacts, run_path
from perfagent_dashboard.server_api import Problem, ServerApi
from perfagent_dashboard.words import say, title_of

__all__ = ["read_trends", "tiles", "window_of"]

_COMPUTE = {"forward", "backward", "optimizer"}
_POINTS = 60
_WORTH_A_TILE = 0.02


@dataclass(slots=True)
class _Tile:
    """series: the chart that it leads to, and whose rules color it. name: of the tile."""

    label: str
    value: str
    unit: str
    more: str
    series: str
    name: str
    tone: str = ""


def tiles(facts: RunFacts, trends: Mapping[str, Mapping[str, Any]]) -> list[Component]:
    """trends: of some series, the whole run in few buckets."""
    known = [
        _loss(facts, trends),
        _throughput(facts),
        _step_time(facts),
        _bottleneck(facts),
        _device(facts),
        _memory(facts),
    ]
    shown = [tile for tile in known if tile is not None]
    return [_card(facts, tile, trends.get(tile.series)) for tile in shown]


def window_of(timing: Mapping[str, Any]) -> str:
    """Of which steps the figures are, in words: newest 100 steps, whole run."""
    window = timing["window"]
    if not window:
        return ""
    return say("window_whole") if window["whole_run"] else say("window_newest", count=window["steps"])


async def read_trends(server: ServerApi, facts: RunFacts) -> dict[str, Mapping[str, Any]]:
    """The series behind the tiles, as far as the run has them."""
    names = [name for name in (facts.loss_name, _rate(facts), "step_time_s") if name in facts.names]

    async def read(name: str) -> Mapping[str, Any] | None:
        try:
            found: Mapping[str, Any] = await server.get(run_path(facts.id, "series"), name=name, points=_POINTS)
        except Problem:
            return None
        return found

    read_all = await asyncio.gather(*(read(name) for name in names))
    return {name: found for name, found in zip(names, read_all, strict=True) if found is not None}


def _card(facts: RunFacts, tile: _Tile, trend: Mapping[str, Any] | None) -> Component:
    value: list[Any] = [tile.value]
    if tile.unit:
        value += [" ", html.Small(tile.unit)]
    return html.Div(
        [
            html.Span(tile.label, className="label"),
            html.Span(value, className="value"),
            html.Span(tile.more, className="more", title=tile.more),
            html.Span(className="trend", **hyphenated(data_values=json.dumps(trend["mean"]))) if trend is not None else None,
        ],
        className=f"figure card {tile.tone or _found_on(facts, tile.series)}",
        tabIndex="0", role="link", title=say("to_chart"), **hyphenated(data_goto=tile.series, data_figure=tile.name),
    )  # fmt: skip


def _found_on(facts: RunFacts, series: str) -> str:
    """warning, where a rule whose alerts stand on the chart of this series speaks now."""
    speaking = [facts.verdict, *facts.findings, *facts.firing]
    found = any(facts.marks.get(one["rule"], [""])[:1] == [series] for one in speaking)
    return "warning" if found else ""


def _rate(facts: RunFacts) -> str:
    return "tokens_per_s" if "tokens_per_s" in facts.timing["rates"] else "samples_per_s"


def _loss(facts: RunFacts, trends: Mapping[str, Mapping[str, Any]]) -> _Tile | None:
    name = facts.loss_name
    value = facts.newest(name)
    if value is None:
        return None
    label = title_of(name) if name == "loss" else name
    return _Tile(
        label, si(value), "", _lowest(trends.get(name)), name, "loss", "" if math.isfinite(value) else "critical"
    )


def _lowest(trend: Mapping[str, Any] | None) -> str:
    """The lowest value of the run with its step; a bucket of several steps has it near its first."""
    if trend is None:
        return ""
    known = [
        (value, at)
        for at, one in enumerate(trend["mean" if trend["ranks"] > 1 else "min"])  # of ranks the figure shows the mean
        if (value := number(one)) is not None and math.isfinite(value)
    ]
    if not known:
        return ""
    value, at = min(known)
    is_one_step = trend["count"][at] <= trend["ranks"]
    key = "kpi_lowest" if is_one_step else "kpi_lowest_near"
    return say(key, value=si(value), step=f"{trend['step'][at]:,}" if is_one_step else si(trend["step"][at]))


def _throughput(facts: RunFacts) -> _Tile | None:
    series = _rate(facts)
    value = facts.median(series)
    if value is None:
        return None
    seconds = facts.median("step_time_s")
    more = _step_rate(seconds) if seconds else ""
    return _Tile(say("kpi_throughput"), *quantity(series, value), more, series, "throughput")


def _step_rate(seconds: float) -> str:
    """How many steps a second; a minute, or an hour, where one takes so long."""
    limits: Sequence[tuple[float, str, float]] = (
        (5, "kpi_steps_per_s", 1), (300, "kpi_steps_per_min", 60), (math.inf, "kpi_steps_per_h", 3600),
    )  # fmt: skip
    name, span = next((name, span) for limit, name, span in limits if seconds < limit)
    return say(name, value=si(span / seconds))


def _step_time(facts: RunFacts) -> _Tile | None:
    series = "step_time_s"
    found = facts.timing["series"].get(series)
    if found is None:
        return None
    more = say("kpi_p90", value=" ".join(quantity(series, number(found["p90"]))))
    middle = number(found["p50"])
    if not facts.timing["rates"] and middle:
        more = f"{_step_rate(middle)}, {more}"
    return _Tile(say("kpi_step_time"), *quantity(series, number(found["p50"])), more, series, "step_time")


def _bottleneck(facts: RunFacts) -> _Tile | None:
    """The largest part of the step beside compute."""
    shares = {
        phase: number(share) or 0.0 for phase, share in facts.timing["phase_shares"].items() if phase not in _COMPUTE
    }
    phase = max(shares, key=lambda one: shares[one], default=None)
    if phase is None or shares[phase] < _WORTH_A_TILE:
        return None
    series = f"phase/{phase}_s"
    title = title_of(series)
    label = phase if title == series else title
    return _Tile(label, percent(shares[phase]), "%", say("kpi_of_step"), series, "bottleneck")


def _device(facts: RunFacts) -> _Tile | None:
    gpu = facts.newest("gpu/utilization_pct")
    if gpu is not None:
        power = facts.newest("gpu/power_w")
        more = say("kpi_power", value=si(power)) if power is not None else ""
        return _Tile(say("kpi_gpu"), si(gpu), "%", more, "gpu/utilization_pct", "device")
    cpu, own = facts.newest("host/cpu_pct"), facts.newest("process/cpu_pct")
    if cpu is None:
        return None
    key = "kpi_processes_cpu" if facts.ranks > 1 else "kpi_process_cpu"
    more = say(key, value=si(own), count=facts.ranks) if own is not None else ""
    return _Tile(say("kpi_cpu"), si(cpu), "%", more, "host/cpu_pct", "device")


_MEMORY = (
    ("gpu/memory_used_bytes", "gpu/memory_total_bytes", "kpi_gpu_memory"),
    ("cuda/allocated_bytes", "gpu/memory_total_bytes", "kpi_gpu_memory"),
    ("process/rss_bytes", "host/memory_total_bytes", "kpi_memory"),
)
"""What is used, of how much, and what it is called; the first that is known."""


def _memory(facts: RunFacts) -> _Tile | None:
    for series, whole, label in _MEMORY:
        used, total = facts.newest(series), facts.newest(whole)
        if used is None:
            continue
        parts = [say("kpi_of", total=" ".join(quantity(whole, total)))] if total else []
        parts += [say("kpi_processes", count=facts.ranks)] if facts.ranks > 1 and label == "kpi_memory" else []
        return _Tile(say(label), *quantity(series, used), ", ".join(parts), series, "memory")
    return None
