"""The words of a message to a chat or a mailbox: one alert in full, or several of a run as a list. Plain text; what a
service makes of it is chat.py's business."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

from perfagent_server.alerts.chat import Message
from perfagent_server.rules.texts import Language, sentence

__all__ = ["message_of"]

_ORDER = ("critical", "warning", "info", "resolved")


def message_of(bodies: Sequence[bytes], language: Language = "en") -> Message:
    """Of the bodies of the deliveries (webhooks.py) that go out together: all about one run, or about none. language: of the
    words around what the bodies say."""
    told = [json.loads(body) for body in bodies]
    found = [one["data"] for one in told]
    severities = [_severity(one) for one in told]
    about = found[0]
    if len(told) == 1:
        alert = about["alert"]
        title = _title(alert)
        lines = [alert["message"]]
        lines += [sentence("cost", language, cost=alert["cost"])] if alert.get("cost") else []
        lines += [sentence("fix", language, fix=about["fix"])] if about["fix"] else []
        title = sentence("over", language, title=title) if severities[0] == "resolved" else title
        return Message(
            title=_of_run(title, about, language), text="\n".join(lines), severity=severities[0], url=about["url"]
        )
    lines = [
        sentence("listed", language, label=severity, title=_title(one["alert"]))
        for severity, one in zip(severities, found, strict=True)
    ]
    title, worst = sentence("alerts", language, count=len(told)), min(severities, key=_ORDER.index)
    return Message(title=_of_run(title, about, language), text="\n".join(lines), severity=worst, url=about["url"])


def _severity(told: dict[str, Any]) -> Literal["info", "warning", "critical", "resolved"]:
    if told["type"] == "alert.resolved":
        return "resolved"
    severity = told["data"]["alert"]["severity"]
    return severity if severity in ("warning", "critical") else "info"


def _of_run(title: str, data: dict[str, Any], language: Language) -> str:
    if data["run"] is None:
        return title
    return sentence("of_run", language, title=title, run=data["run_name"] or data["run"], project=data["project"])


def _title(alert: dict[str, Any]) -> str:
    return str(alert.get("title") or alert["message"]).rstrip(".") or str(alert["rule"])
