"""Builds and signs the body of a webhook: our alerts, in the envelope of Standard Webhooks.

Signed by ourselves, in UTC seconds, with any number of secrets (rotation): the reference library has one key and wrong
timestamps for local times. The tests verify with that library.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import secrets
from typing import Any

from perfagent.errors import ConfigError, WireError
from perfagent.wire import Alert, Finding, plain, to_json
from perfagent_server.timestamps import rfc3339

__all__ = ["alert_body", "delivery_id", "headers", "new_secret", "notice_body", "secret_bytes", "sign", "text_json"]

_PREFIX = "whsec_"
_MAX_EVIDENCE_BYTES = 48 * 1024


def new_secret() -> str:
    return _PREFIX + base64.b64encode(secrets.token_bytes(24)).decode()


def secret_bytes(secret: str) -> bytes:
    """The key in a secret. Raises ConfigError for one that is not whsec_ and base64 of 24 to 64 bytes, as the standard
    asks."""
    try:
        key = base64.b64decode(secret.removeprefix(_PREFIX), validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if not secret.startswith(_PREFIX) or not 24 <= len(key) <= 64:
        raise ConfigError(
            "a webhook secret is whsec_ followed by the base64 of 24 to 64 bytes; leave it out to have one made"
        )
    return key


def sign(secret: str, message_id: str, timestamp: int, body: bytes) -> str:
    """The signature of one secret: "v1," and base64(HMAC-SHA256(id.timestamp.body))."""
    signed = f"{message_id}.{timestamp}.".encode() + body
    return "v1," + base64.b64encode(hmac.new(secret_bytes(secret), signed, hashlib.sha256).digest()).decode()


def headers(secret: str, message_id: str, timestamp: int, body: bytes) -> dict[str, str]:
    """All headers of one try. The id is the same on every try, the timestamp and so the signature are not. A secret
    that is being rotated is "new old", both of which sign. Raises ConfigError without any: nothing leaves unsigned."""
    if not secret.strip():
        raise ConfigError("the channel has no secret to sign with; remove it and add it again")
    return {
        "Content-Type": "application/json",
        "User-Agent": "perfagent-webhook/1",
        "webhook-id": message_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": " ".join(sign(one, message_id, timestamp, body) for one in secret.split()),
    }


def delivery_id(*parts: str) -> str:
    """The webhook-id of an event on a channel: the same event gets the same id, however often it is written."""
    return "msg_" + hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def alert_body(
    event: str,
    now: float,
    *,
    alert: str,
    state: str,
    finding: Finding | Alert,
    run: str | None,
    run_name: str | None,
    project: str | None,
    url: str,
) -> bytes:
    """The body of alert.firing and alert.resolved. finding: with what it costs, where that is known. run: None for what is
    about the server itself."""
    evidence = json.loads(text_json(finding.evidence))
    if len(text_json(evidence)) > _MAX_EVIDENCE_BYTES:
        evidence = {
            key: value
            for key, value in evidence.items()
            if not isinstance(value, (list, dict, str)) or len(str(value)) < 4000
        }
    body = {
        "type": event,
        "timestamp": rfc3339(now),
        "data": {
            "alert": {
                "id": alert, "rule": finding.rule, "severity": finding.severity, "message": finding.message,
                "since": finding.since or rfc3339(now), "ranks": finding.ranks, "state": state, "since_step": finding.since_step,
                "title": finding.title, "cost": finding.cost, "money_per_hour": finding.money_per_hour,
                "currency": finding.currency,
            },
            "run": run, "run_name": run_name, "project": project, "evidence": evidence, "fix": finding.fix, "url": url,
        },
    }  # fmt: skip
    return text_json(body).encode()


def notice_body(
    event: str, now: float, message: str, *, title: str = "", severity: str = "info", channel: str = "", url: str = "",
    run: str | None = None, run_name: str | None = None, project: str | None = None,
) -> bytes:  # fmt: skip
    """The body of what is about no alert (channel.test, channel.disabled, run.ended, digest), in the shape of an
    alert's."""
    body = {
        "type": event,
        "timestamp": rfc3339(now),
        "data": {
            "alert": {
                "id": delivery_id(event, channel, str(now)), "rule": event, "severity": severity, "message": message,
                "since": rfc3339(now), "ranks": [], "title": title or message,
            },
            "run": run, "run_name": run_name, "project": project, "evidence": {"channel": channel}, "fix": "", "url": url,
        },
    }  # fmt: skip
    return text_json(body).encode()


def text_json(value: Any) -> str:
    """JSON text of anything that came over the wire: what JSON cannot say becomes its text."""
    try:
        return to_json(value).decode()
    except (WireError, UnicodeError, OverflowError, RecursionError):
        return json.dumps(_speakable(value))


def _speakable(value: Any, depth: int = 0) -> Any:
    if depth > 20:
        return "..."
    if isinstance(value, dict):
        return {str(_speakable(str(key))): _speakable(item, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_speakable(item, depth + 1) for item in value]
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if value is None or isinstance(value, (bool, int, float)):
        return plain(value)
    return repr(value)[:1000]
