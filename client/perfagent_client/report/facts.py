"""What the server knows of a run, as far as its report shows it."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

from perfagent.errors import WireError
from perfagent.wire import Alert, Finding, Latest, Series, Timing
from perfagent_client.client import ApiError, Client
from perfagent_client.models import RunDetails, parse
from perfagent_client.report.charts import POINTS, names_of_charts

__all__ = ["ReportFacts", "ToldAlert", "read_facts"]

_ALERTS = 30
_CONSOLE_EVENTS = 200


@dataclass(frozen=True, slots=True)
class ToldAlert:
    """history: what happened to it, oldest first, each with time, event, who and note."""

    alert: Alert
    history: Sequence[Mapping[str, str]] = ()


@dataclass(slots=True)
class ReportFacts:
    """alerts: the newest, newest first, of `alert_count`; series: of the charts, in their order; logs, states: the newest
    events of these kinds, oldest of them first; address: of the run's page; written: RFC 3339 UTC."""

    run: RunDetails
    verdict: Finding
    findings: Sequence[Finding]
    latest: Mapping[str, Latest]
    timing: Timing
    alerts: Sequence[ToldAlert] = ()
    alert_count: int = 0
    series: Sequence[Series] = ()
    logs: Sequence[Mapping[str, Any]] = ()
    states: Sequence[Mapping[str, Any]] = ()
    address: str = ""
    written: str = ""
    annotations: Sequence[Mapping[str, Any]] = ()
    """What people wrote at steps."""
    names: int = field(default=0)
    """How many series the run has."""


def read_facts(client: Client, run: RunDetails) -> ReportFacts:
    ident = run.run
    alerts, names = client.alerts(ident), client.names(ident)
    kept = client.request("GET", f"/runs/{quote(ident, safe='')}", params={"with": "annotations,panels"})
    return ReportFacts(
        run=run,
        verdict=client.verdict(ident),
        findings=client.findings(ident),
        latest=client.latest(ident),
        timing=client.timing(ident),
        alerts=[ToldAlert(alert, _history(client, alert.id)) for alert in alerts[:_ALERTS]],
        alert_count=len(alerts),
        series=[
            found for each in _asked(names, kept["panels"]) if (found := _series(client, ident, **each)) is not None
        ],
        annotations=kept["annotations"],
        logs=client.events(ident, kind="log", limit=_CONSOLE_EVENTS),
        states=client.events(ident, kind="state", limit=100),
        address=f"{client.server}/run/{quote(ident, safe='')}",
        written=datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        names=len(names),
    )


def _history(client: Client, alert: str) -> Sequence[Mapping[str, str]]:
    with contextlib.suppress(ApiError):  # deleted in the meantime
        return client.history(alert)
    return ()


def _asked(names: Sequence[str], panels: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Of the charts, as queries: first the expressions in people's panels whose series a run has."""
    lines = [line for panel in panels for line in panel["lines"] if line["expression"] not in line["names"]]
    found = dict.fromkeys(line["expression"] for line in lines if set(names).issuperset(line["names"]))
    return [*({"expression": one} for one in found), *({"name": name} for name in names_of_charts(names))]


def _series(client: Client, run: str, **query: str) -> Series | None:
    """None where it cannot be read: a report without one of its charts is still a report."""
    with contextlib.suppress(ApiError, WireError):
        params = {**query, "points": POINTS}
        found = parse(Series, client.request("GET", f"/runs/{quote(run, safe='')}/series", params=params))
        return found if found.step else None
    return None
