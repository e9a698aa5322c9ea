"""Alerts of imported runs: what their sender found in each run as a whole. They are over, and nobody is told of them."""

from __future__ import annotations

import hashlib
import json
import math

from sqlalchemy import Connection, delete, insert

from perfagent_server.alerts.evidence_limit import limited
from perfagent_server.alerts.state_machine import RUN_ENDED
from perfagent_server.alerts.webhooks import text_json
from perfagent_server.event_data import ImportData, ImportedFinding
from perfagent_server.rules.texts import TITLE
from perfagent_server.store.tables import alert, alert_history

__all__ = ["put_findings"]

_OVER = "it was over"
_TEXT = 2000


def put_findings(connection: Connection, run: str, said: ImportData) -> None:
    """In place of those of an earlier import of the same run. One that judged nothing leaves them."""
    if said.findings is None:
        return
    connection.execute(delete(alert).where(alert.c.run == run, alert.c.id.startswith("ai_")))
    for number, found in enumerate(said.findings):
        row = _row(run, number, found)
        connection.execute(insert(alert).values(**row))
        for event, time in (("fired", row["fired"]), ("resolved", row["resolved"])):
            key = hashlib.sha256(f"{row['id']}\n{event}".encode()).hexdigest()[:32]
            values = {
                "id": f"hi_{key}",
                "alert": row["id"],
                "time": time,
                "event": event,
                "who": "",
                "note": "imported",
            }
            connection.execute(insert(alert_history).values(**values))


def _row(run: str, number: int, found: ImportedFinding) -> dict[str, object]:
    since = found.time if math.isfinite(found.time) else 0.0
    ended = max(since, found.ended) if found.ended is not None and math.isfinite(found.ended) else since
    message = (found.message or "")[:_TEXT]
    why = RUN_ENDED if found.to_the_end else _OVER
    return {
        "id": "ai_" + hashlib.sha256(f"{run}\n{number}\n{found.rule}".encode()).hexdigest()[:20], "run": run,
        "rule": found.rule[:64], "severity": found.severity, "state": "resolved", "message": message,
        "fix": (found.fix or "")[:_TEXT], "title": (found.title or message)[:TITLE], "cause": (found.cause or "")[:TITLE],
        "cost": (found.cost or "")[:_TEXT], "evidence": text_json({**limited(found.evidence or {}), "resolved": why}),
        "ranks": json.dumps((found.ranks or [])[:4096]), "gain_pct": found.gain_pct, "since": since,
        "since_step": found.since_step, "last_step": found.last_step, "fired": since, "resolved": ended,
    }  # fmt: skip
