"""Channels: where alerts are sent. Only webhooks so far; a channel's secret is shown once, when it is made."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, delete, insert, select, update

from perfagent.errors import ConfigError
from perfagent.wire import SEVERITIES
from perfagent_server.alerts.webhooks import new_secret, notice_body, secret_bytes
from perfagent_server.store.tables import channel, delivery
from perfagent_server.timestamps import rfc3339

__all__ = ["KINDS", "NewChannel", "all_channels", "create", "new_test", "remove", "set_enabled"]

KINDS = ("webhook",)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewChannel:
    """A channel to make. Raises ConfigError for what cannot be one. The URL's address is the guard's business."""

    name: str
    url: str
    kind: str = "webhook"
    secret: str | None = None
    min_severity: str = "warning"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"a channel's kind is one of {', '.join(KINDS)}, not {self.kind[:40]!r}")
        if self.min_severity not in SEVERITIES:
            raise ConfigError(f"min_severity is one of {', '.join(SEVERITIES)}, not {self.min_severity[:40]!r}")
        if not self.name.strip() or len(self.name) > 256:
            raise ConfigError("a channel's name has 1 to 256 characters")
        if len(self.url) > 2000:
            raise ConfigError("a channel's URL has at most 2000 characters")
        if self.secret and not self.secret.strip():
            raise ConfigError("a webhook secret of blanks signs nothing; leave it out to have one made")
        for secret in (self.secret or "").split():
            secret_bytes(secret)


def create(connection: Connection, new: NewChannel, now: float) -> tuple[str, str]:
    """Writes a channel; its id and secret."""
    identifier = "ch_" + uuid.uuid4().hex[:20]
    secret = new.secret or new_secret()
    connection.execute(
        insert(channel).values(
            id=identifier, name=new.name, kind=new.kind, url=new.url, secret=secret, min_severity=new.min_severity, enabled=True,
            disabled_reason="", created=now,
        )
    )  # fmt: skip
    return identifier, secret


def all_channels(connection: Connection) -> list[dict[str, Any]]:
    """Every channel, oldest first, without its secret."""
    rows = connection.execute(select(channel).order_by(channel.c.created, channel.c.id)).mappings()
    return [
        {
            "id": row["id"], "name": row["name"], "kind": row["kind"], "url": row["url"], "min_severity": row["min_severity"],
            "enabled": bool(row["enabled"]), "disabled_reason": row["disabled_reason"], "created": rfc3339(row["created"]),
            "failing_since": rfc3339(row["failing_since"]),
        }
        for row in rows
    ]  # fmt: skip


def remove(connection: Connection, identifier: str) -> bool:
    """Deletes a channel with its deliveries. False when there is none of that id."""
    connection.execute(delete(delivery).where(delivery.c.channel == identifier))
    return connection.execute(delete(channel).where(channel.c.id == identifier)).rowcount == 1


def set_enabled(connection: Connection, identifier: str, *, enabled: bool, reason: str = "") -> None:
    values: dict[str, Any] = {"enabled": enabled, "disabled_reason": reason}
    if enabled:
        values["failing_since"] = None
    connection.execute(update(channel).where(channel.c.id == identifier).values(**values))


def new_test(connection: Connection, identifier: str, now: float) -> str | None:
    """Writes a test delivery into the outbox; its id, None when there is no such channel."""
    if connection.execute(select(channel.c.id).where(channel.c.id == identifier)).first() is None:
        return None
    message_id = "msg_" + uuid.uuid4().hex
    body = notice_body(
        "channel.test", now, "This is a test. Alerts of your runs will look like this.", channel=identifier
    )
    connection.execute(
        insert(delivery).values(
            id=message_id, channel=identifier, alert=None, event="channel.test", body=body, state="waiting", tries=0, created=now,
            due=now, error="",
        )
    )  # fmt: skip
    return message_id
