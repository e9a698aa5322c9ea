"""Findings that no rule of ours makes: what the agent reports, and what a user's script says with run.alert()."""

from __future__ import annotations

import hashlib
import math
from typing import Any

from perfagent.wire import SEVERITIES, Event, Finding
from perfagent.wire.limits import whole
from perfagent_server.alerts.evidence_limit import limited
from perfagent_server.rules.causes import UNRECORDED, unrecorded_words
from perfagent_server.rules.rule import USER_ALERT, Life
from perfagent_server.rules.texts import TITLE
from perfagent_server.timestamps import rfc3339

__all__ = ["REPORTED_LIFE", "USER_LIFE", "of_the_agent", "of_the_user", "step_of", "time_of", "title_key", "user_key"]

REPORTED_LIFE = Life(outlives_run=True)
USER_LIFE = Life(cooldown_s=60.0)
_LEVELS = {"warn": "warning", "error": "critical"}
_RANKS = 4096


def of_the_agent(event: Event, rank: int, now: float, newest_step: int) -> Finding | None:
    """What a `finding` event says; None when it names no rule or severity."""
    data = event.data
    rule, severity = str(data.get("rule", ""))[:64], str(data.get("severity", "warning"))
    if not rule or severity not in SEVERITIES:
        return None
    ranks = data.get("ranks")
    named = [one for one in ranks if whole(one) is not None] if isinstance(ranks, list) else []
    evidence, gain = data.get("evidence"), data.get("gain_pct")
    message = str(data.get("message", ""))[:2000]
    return Finding(
        rule=rule,
        severity=severity,
        title=str(data.get("title") or message)[:TITLE],
        message=message,
        since_step=step_of(newest_step, data.get("since_step"), event.step),
        since=rfc3339(time_of(event, now)),
        ranks=named[:_RANKS] or [rank],
        evidence=limited(evidence) if isinstance(evidence, dict) else {},
        fix=str(data.get("fix", ""))[:2000],
        gain_pct=float(gain) if isinstance(gain, (int, float)) and math.isfinite(gain) else None,
    )


def of_the_user(event: Event, rank: int, now: float, newest_step: int) -> Finding:
    """What run.alert(title, text, level) says."""
    title, message = _title_and_message(event)
    facts = {UNRECORDED: event.data[UNRECORDED]} if UNRECORDED in event.data else {}
    level = str(event.data.get("level", "warning")).lower()
    level = _LEVELS.get(level, level)
    return Finding(
        rule=USER_ALERT,
        severity=level if level in SEVERITIES else "warning",
        title=title[:TITLE],
        message=message,
        since_step=step_of(newest_step, event.step),
        since=rfc3339(time_of(event, now)),
        ranks=[rank],
        evidence=facts or {"title": title, "text": str(event.data.get("text", ""))[:4000]},
    )


def user_key(event: Event) -> str:
    """The key of the machine of a user's alert."""
    return title_key(_title_and_message(event)[0])


def title_key(title: str) -> str:
    """The key of the machine of the user's alerts of this title."""
    return f"{USER_ALERT}:{hashlib.sha256(title.encode('utf-8', 'replace')).hexdigest()[:16]}"


def _title_and_message(event: Event) -> tuple[str, str]:
    title, text = str(event.data.get("title", ""))[:256], str(event.data.get("text", ""))[:4000]
    return unrecorded_words(event.data) or (title, f"{title}: {text}" if text else title)


def time_of(event: Event, now: float) -> float:
    """When an event was, by the clock of its sender, if that clock says anything; else now, by ours."""
    return event.time if math.isfinite(event.time) else now


def step_of(newest_step: int, *named: Any) -> int:
    """The first of these that is a step; else the newest step of the run."""
    return next((step for one in named if (step := whole(one)) is not None), newest_step)
