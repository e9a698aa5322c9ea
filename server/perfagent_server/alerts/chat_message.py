"""The words of a message to a chat or a mailbox: one alert in full, or several of a run as a list. Plain text; what a
service makes of it is chat.py's business."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

from perfagent_server.alerts.chat import Message

__all__ = ["message_of"]

_ORDER = ("critical", "warning", "info", "resolved")


def message_of(bodies: Sequence[bytes]) -> Message:
    """Of the bodies of the deliveries (webhooks.py) that go out together: all about one run, or about none."""
    told = [json.loads(body) for body in bodies]
    found = [one["data"] for one in told]
    severities = [_severity(one) for one in told]
    about, where = found[0], _where(found[0])
    if len(told) == 1:
        alert = about["alert"]
        title = (alert.get("title") or alert["message"]).rstrip(".")
        lines = [alert["message"], _cost(alert), f"What to do: {about['fix']}" if about["fix"] else ""]
        over = "Over: " if severities[0] == "resolved" else ""
        return Message(
            title=f"{over}{title}{where}", text="\n".join(filter(None, lines)), severity=severities[0], url=about["url"]
        )
    lines = [f"{severity}: {_line(one)}" for severity, one in zip(severities, found, strict=True)]
    worst = min(severities, key=_ORDER.index)
    return Message(title=f"{len(told)} alerts{where}", text="\n".join(lines), severity=worst, url=about["url"])


def _severity(told: dict[str, Any]) -> Literal["info", "warning", "critical", "resolved"]:
    if told["type"] == "alert.resolved":
        return "resolved"
    severity = told["data"]["alert"]["severity"]
    return severity if severity in ("warning", "critical") else "info"


def _where(data: dict[str, Any]) -> str:
    if data["run"] is None:
        return ""
    return f" ({data['run_name']}, project {data['project']})" if data["project"] else f" ({data['run_name']})"


def _line(data: dict[str, Any]) -> str:
    alert = data["alert"]
    return str(alert.get("title") or alert["message"]).rstrip(".")


def _cost(alert: dict[str, Any]) -> str:
    return f"Cost: {alert['cost']}." if alert.get("cost") else ""
