"""All runs as the table shows them: what the server listed, and what it has sent since. Pure: no terminal, no clock."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from perfagent.errors import WireError
from perfagent.wire import ENDED, OUTCOMES, SEVERITIES, Alert, RunSummary, from_json
from perfagent_client.models import parse

__all__ = ["LOSSES", "RATES", "Fleet", "FleetRow", "worst"]

LOSSES = ("loss", "train/loss", "train_loss", "training_loss")
RATES = ("tokens_per_s", "samples_per_s")
_FIELDS = {item.name for item in fields(RunSummary)} - {"run"}


@dataclass(slots=True)
class FleetRow:
    """run: as listed, without its configuration; alerts: those that fire, by id; values: newest by name; curve: of the
    whole run's loss; rate: (name, value) of the throughput over the server's window; verdict: of a run that ended."""

    run: RunSummary
    alerts: dict[str, Alert] = field(default_factory=dict)
    values: dict[str, float] = field(default_factory=dict)
    curve: list[float] = field(default_factory=list)
    rate: tuple[str, float] | None = None
    verdict: str = ""

    @property
    def worst(self) -> Alert | None:
        """Of the alerts that fire, the one to speak of: nobody's before somebody's, then by severity, then the oldest."""
        return worst(self.alerts.values())

    @property
    def severity(self) -> str:
        """The worst of its alerts that fire, and of its verdict once it has ended."""
        said: list[str] = [alert.severity for alert in self.alerts.values()]
        if self.has_ended or self.run.state == "lost":
            said.append(self.run.severity or "unknown")
        elif not said:
            said.append("healthy" if self.run.step else "unknown")
        return max(said, key=lambda one: OUTCOMES.index(one) if one in OUTCOMES else 0)

    @property
    def title(self) -> str:
        alert = self.worst
        if alert is None:
            return self.verdict or self.run.reason
        taken = [f"seen by {alert.acknowledged_by or 'somebody'}"] if alert.acknowledged else []
        taken += ["muted"] if alert.muted_until else []
        return f"{', '.join(taken)}: " * bool(taken) + (alert.title or alert.message)

    @property
    def loss(self) -> float | None:
        return next((self.values[name] for name in LOSSES if name in self.values), None)

    @property
    def has_ended(self) -> bool:
        return self.run.state in ENDED

    def order(self) -> tuple[int, int]:
        """What needs somebody first: alerts that nobody has taken, then runs in a bad state, then those that are taken, those
        that go on, and those that have ended."""
        alert = self.worst
        if alert is not None and alert.severity != "info":
            return (2 if alert.acknowledged or alert.muted_until else 0), -SEVERITIES.index(alert.severity)
        if self.run.state == "lost":
            return 1, 0
        return (4 if self.has_ended else 3), -SEVERITIES.index(self.severity) if self.severity in SEVERITIES else 0

    def matches(self, words: Iterable[str]) -> bool:
        run = self.run
        text = " ".join(
            (run.name, run.project, run.run, run.state, run.host or "", *run.tags, self.severity, self.title)
        ).lower()
        return all(word in text for word in words)


class Fleet:
    def __init__(self) -> None:
        self.rows: dict[str, FleetRow] = {}

    def load(self, runs: Iterable[RunSummary], alerts: Iterable[Alert]) -> None:
        """What the server lists now; curves and values that are known already stay."""
        before = self.rows
        self.rows = {}
        for run in runs:
            row = before.get(run.run) or FleetRow(run)
            row.run, row.alerts = run, {}
            self.rows[run.run] = row
        for alert in alerts:
            self._take(alert)

    def take(self, message: Mapping[str, Any]) -> bool:
        """A message of a fleet's WebSocket. Whether it names a run that is not known: the list is to be fetched again."""
        if isinstance(message.get("alert"), Mapping):
            alert = parse(Alert, message["alert"])
            self._take(alert)
            return alert.run not in self.rows
        unknown = False
        for run, change in (message.get("fleet") or {}).items():
            if change is None:
                self.rows.pop(run, None)
            elif run in self.rows:
                self._change(self.rows[run], change)
            else:
                unknown = True
        return unknown

    def listed(self, text: str = "") -> list[FleetRow]:
        """Those that match all words, in the order of the table; of equals the newest first."""
        words = text.lower().split()
        found = [row for row in self.rows.values() if row.matches(words)]
        found.sort(key=lambda row: (row.run.started, row.run.run), reverse=True)
        found.sort(key=FleetRow.order)
        return found

    def _take(self, alert: Alert) -> None:
        row = self.rows.get(alert.run)
        if row is None:
            return
        if alert.state == "firing":
            row.alerts[alert.id] = alert
        else:
            row.alerts.pop(alert.id, None)

    def _change(self, row: FleetRow, change: Mapping[str, Any]) -> None:
        for name in _FIELDS & change.keys():
            setattr(row.run, name, change[name])
        for name, value in (change.get("values") or {}).items():
            try:
                row.values[name] = from_json(value)
            except WireError:
                row.values.pop(name, None)


def worst(alerts: Iterable[Alert]) -> Alert | None:
    def order(alert: Alert) -> tuple[bool, int, str]:
        severity = SEVERITIES.index(alert.severity) if alert.severity in SEVERITIES else 0
        return bool(alert.acknowledged or alert.muted_until), -severity, alert.since

    return min(alerts, key=order, default=None)
