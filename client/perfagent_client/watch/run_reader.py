"""The questions behind a run's screen."""

from __future__ import annotations

import asyncio
from typing import Any

from perfagent_client.client import AsyncClient
from perfagent_client.models import RunDetails
from perfagent_client.sparkline import curve_of
from perfagent_client.watch.run_view import RunView

__all__ = ["read_run"]

_POINTS = 120
_CONSOLE_EVENTS, _CONSOLE_LINES = 20, 40


async def read_run(client: AsyncClient, run: str) -> RunView:
    details, verdict, timing, latest, alerts, told = await asyncio.gather(
        client.run(run), client.verdict(run), client.timing(run), client.latest(run), client.alerts(run),
        client.request("GET", f"/runs/{run}/events", params={"kind": "log", "limit": _CONSOLE_EVENTS}),
    )  # fmt: skip
    view = RunView(details, verdict, timing, latest, alerts, console=_lines(told["events"], details))
    names = view.names_of_curves()
    for series in await asyncio.gather(*(client.series(run, name, points=_POINTS) for name in names)):
        view.curves[series.name] = curve_of(series)
    return view


def _lines(events: list[dict[str, Any]], run: RunDetails) -> list[str]:
    lines = []
    for event in events:
        told = (event.get("data") or {}).get("lines")
        front = f"[{event.get('rank')}] " if run.world_size > 1 else ""
        lines += [front + str(line) for line in told] if isinstance(told, list) else []
    return lines[-_CONSOLE_LINES:]
