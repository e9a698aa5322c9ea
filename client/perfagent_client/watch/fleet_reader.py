"""The questions behind the table of runs: the list, the alerts that fire, and of the runs in sight loss and throughput."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from perfagent.wire import Alert, RunSummary, Timing
from perfagent_client.client import ApiError, AsyncClient
from perfagent_client.models import parse
from perfagent_client.sparkline import curve_of
from perfagent_client.watch.fleet import LOSSES, RATES, Fleet, FleetRow

__all__ = ["CURVE", "FleetReader"]

CURVE = 14
"""Buckets of the small curve of a loss."""
_RUNS = 500
_AT_ONCE = 4
_CURVE_EVERY_S = 15.0


class FleetReader:
    def __init__(self, client: AsyncClient, fleet: Fleet) -> None:
        self._client, self._fleet = client, fleet
        self._curves: dict[str, tuple[float, int, str, str]] = {}
        """When that of a run was read, at which step, in which state and with which severity."""

    async def read_list(self) -> None:
        """The newest runs, and every older one of which an alert fires."""
        page, firing = await asyncio.gather(
            self._client.request("GET", "/runs", params={"limit": _RUNS}),
            self._client.request("GET", "/alerts", params={"state": "firing"}),
        )
        runs = [parse(RunSummary, item) for item in page["runs"]]
        alerts = [parse(Alert, item) for item in firing["alerts"]]
        older = sorted({alert.run for alert in alerts} - {run.run for run in runs})
        runs += await asyncio.gather(*(self._client.run(run) for run in older))
        self._fleet.load(runs, alerts)

    async def read_rows(self, rows: Sequence[FleetRow]) -> None:
        """Loss and throughput of these runs."""
        limit = asyncio.Semaphore(_AT_ONCE)

        async def curve(row: FleetRow) -> None:
            async with limit:
                await self._read_curve(row)

        if rows:
            await asyncio.gather(self._read_rates(rows), *(curve(row) for row in rows if self._is_due(row)))

    def _is_due(self, row: FleetRow) -> bool:
        at, *before = self._curves.get(row.run.run, (0.0, -1, "", ""))
        moved = before != [row.run.step, row.run.state, row.severity]
        return moved and (time.monotonic() - at > _CURVE_EVERY_S or row.has_ended or not row.curve)

    async def _read_rates(self, rows: Sequence[FleetRow]) -> None:
        by_run = {row.run.run: row for row in rows}
        answer = await self._client.request("GET", "/timing", params={"run": list(by_run)})
        for run, item in answer["timing"].items():
            timing = parse(Timing, item)
            name = next((name for name in RATES if name in timing.rates), None)
            if run in by_run:
                by_run[run].rate = None if name is None else (name, timing.rates[name].p50)

    async def _read_curve(self, row: FleetRow) -> None:
        run = row.run.run
        self._curves[run] = (time.monotonic(), row.run.step, row.run.state, row.severity)
        try:
            if row.has_ended and row.severity != "healthy":
                verdict = await self._client.verdict(run)
                row.verdict = verdict.title or verdict.message
            latest = await self._client.latest(run)
            loss = next((name for name in LOSSES if name in latest), None)
            if loss is not None:
                series = await self._client.series(run, loss, points=CURVE)
                row.curve = curve_of(series)
                row.values[loss] = latest[loss].value
        except ApiError as error:
            if error.status != 404:  # deleted in the meantime
                raise
