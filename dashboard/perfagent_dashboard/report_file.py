"""`GET /report/<run>`: the report of a run as one HTML file, as `perfagent report` writes it, of what the viewer may see."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

from dash.backends._fastapi import reset_current_request, set_current_request
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response

from perfagent.wire import Alert, Finding, Latest, Series, Timing
from perfagent_client.models import RunDetails, parse
from perfagent_client.report.charts import POINTS
from perfagent_client.report.facts import ReportFacts, ToldAlert, series_asked
from perfagent_client.report.page import report_html
from perfagent_dashboard.server_api import Problem, ServerApi

__all__ = ["serve_reports"]

_MOST_ALERTS = 30
_CONSOLE_EVENTS = 200


def serve_reports(api: FastAPI, server: ServerApi, address: str) -> None:
    """address: of the server, for the link from the report to the page."""

    async def report(request: Request) -> Response:
        run = request.path_params["run"]
        token = set_current_request(request)  # type: ignore[no-untyped-call]
        try:
            facts = await _read(server, run, address)
        except Problem as problem:
            return PlainTextResponse(problem.message, problem.status)
        finally:
            reset_current_request(token)  # type: ignore[no-untyped-call]
        name = f"{quote(facts.run.name or facts.run.run, safe=' ')}.html"
        html = await asyncio.to_thread(report_html, facts)
        headers = {"Content-Disposition": f"attachment; filename*=UTF-8''{quote(name)}", "Cache-Control": "no-store"}
        return HTMLResponse(html.encode("utf-8", "replace"), headers=headers)

    api.add_api_route("/report/{run}", report, methods=["GET"], include_in_schema=False)


async def _read(server: ServerApi, run: str, address: str) -> ReportFacts:
    """As `perfagent_client.report.facts.read_facts`, by requests in this process. Raises Problem."""
    kept = await server.get(_path(run), with_="annotations,panels")
    summary = parse(RunDetails, kept)
    ident = summary.run
    verdict, findings, latest, timing, alerts, names, logs, states = await asyncio.gather(
        server.get(_path(ident, "verdict")),
        server.get(_path(ident, "findings")),
        server.get(_path(ident, "latest")),
        server.get(_path(ident, "timing")),
        server.get(_path(ident, "alerts")),
        server.get(_path(ident, "names")),
        server.get(_path(ident, "events"), kind="log", limit=_CONSOLE_EVENTS),
        server.get(_path(ident, "events"), kind="state", limit=100),
    )
    told = [parse(Alert, one) for one in alerts["alerts"]]
    histories, series = await asyncio.gather(
        asyncio.gather(*(server.get(f"/alerts/{quote(one.id, safe='')}") for one in told[:_MOST_ALERTS])),
        _series(server, ident, series_asked(names["names"], kept["panels"])),
    )
    return ReportFacts(
        run=summary,
        verdict=parse(Finding, verdict),
        findings=[parse(Finding, one) for one in findings["findings"]],
        latest={name: parse(Latest, one) for name, one in latest.items()},
        timing=parse(Timing, timing),
        alerts=[ToldAlert(one, found["history"]) for one, found in zip(told, histories, strict=False)],
        alert_count=len(told),
        series=series,
        annotations=kept["annotations"],
        logs=logs["events"],
        states=states["events"],
        address=f"{address.rstrip('/')}/run/{quote(ident, safe='')}",
        written=datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        names=len(names["names"]),
    )


async def _series(server: ServerApi, run: str, queries: Sequence[Mapping[str, str]]) -> list[Series]:
    """Those that can be read: a report without one of its charts is still a report."""
    path = _path(run, "series")
    found: list[Any] = await asyncio.gather(
        *(server.get(path, points=POINTS, **query) for query in queries), return_exceptions=True
    )
    return [parse(Series, one) for one in found if isinstance(one, dict) and one["step"]]


def _path(run: str, *more: str) -> str:
    return "/".join(["/runs", quote(run, safe=""), *more])
