"""Channels: where alerts are sent, how they are set, and what may be shown of them. A secret is shown once, when it is
made; addresses of chats and mailboxes are secrets themselves, and are shown masked."""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, RowMapping, delete, insert, select, update

from perfagent.errors import ConfigError
from perfagent.wire import SEVERITIES
from perfagent_server.alerts import chat
from perfagent_server.alerts.kinds import CHAT_KINDS, HEARTBEAT, KINDS, WEBHOOK
from perfagent_server.alerts.webhooks import new_secret, notice_body, secret_bytes
from perfagent_server.rules.texts import LANGUAGES
from perfagent_server.security.outbound import Guard
from perfagent_server.store.stored_json import stored_names
from perfagent_server.store.tables import channel, delivery
from perfagent_server.timestamps import rfc3339

__all__ = [
    "HEARTBEAT", "KINDS", "NewChannel", "all_channels", "change", "check_url", "create", "new_test", "read", "remove", "rotate",
    "set_enabled", "shown_url",
]  # fmt: skip

GROUP_S = 600.0
"""By default a chat or a mailbox gets one message about a run in ten minutes, apart from what is critical."""
ROTATION_S = 86400.0
"""How long the old secret signs beside the new one."""
_MOST_SECRETS = 4  # beside the new one
_TOKEN_CHARACTERS, _LONG_CHARACTERS = 12, 16
_LEAST_EVERY_S, _LONGEST_S = 10.0, 366 * 86400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NewChannel:
    """A channel to make. Raises ConfigError for what cannot be one. The URL is checked by check_url().

    projects, tags: only runs of one of these projects, and with one of these tags; empty is any. group_s: the shortest
    time between two messages about a run, apart from critical alerts; 0: each alert by itself. repeat_s: an alert that
    still fires and that nobody acknowledged is told again; 0: never. summaries: also what became of each run that ended.
    every_s: of a digest while all is well, or between heartbeats. language: of its messages.
    """

    name: str
    url: str
    kind: str = WEBHOOK
    secret: str | None = None
    min_severity: str = "warning"
    projects: list[str] = field(default_factory=list)
    tags: list[str] = field(default_factory=list)
    group_s: float | None = None
    repeat_s: float = 0.0
    summaries: bool = False
    every_s: float = 0.0
    language: str = "en"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"a channel's kind is one of {', '.join(KINDS)}, not {self.kind[:40]!r}")
        if self.min_severity not in SEVERITIES:
            raise ConfigError(f"min_severity is one of {', '.join(SEVERITIES)}, not {self.min_severity[:40]!r}")
        if self.language not in LANGUAGES:
            raise ConfigError(f"a channel's language is one of {', '.join(LANGUAGES)}, not {self.language[:40]!r}")
        if not self.name.strip() or len(self.name) > 256:
            raise ConfigError("a channel's name has 1 to 256 characters")
        if len(self.url) > 2000:
            raise ConfigError("a channel's URL has at most 2000 characters")
        if self.secret and self.kind != WEBHOOK:
            raise ConfigError(f"only a webhook has a secret of its own; that of a {self.kind} channel is in its URL")
        if self.secret and not self.secret.strip():
            raise ConfigError("a webhook secret of blanks signs nothing; leave it out to have one made")
        for secret in (self.secret or "").split():
            secret_bytes(secret)
        for name in ("group_s", "repeat_s", "every_s"):
            value = getattr(self, name)
            if value is not None and value != 0 and not _LEAST_EVERY_S <= value <= _LONGEST_S:
                raise ConfigError(f"{name} is 0 or {_LEAST_EVERY_S:g} s to a year, not {value}")
        if self.group_s and self.kind not in CHAT_KINDS:
            raise ConfigError(f"group_s is for chats and mail; a {self.kind} gets every alert by itself, and at once")
        if self.kind == HEARTBEAT and not self.every_s:
            raise ConfigError("a heartbeat channel needs every_s: how often the server says that it is alive")
        for name in ("projects", "tags"):
            if len(getattr(self, name)) > 100 or any(not 1 <= len(one) <= 256 for one in getattr(self, name)):
                raise ConfigError(f"{name} is a list of up to 100 names of 1 to 256 characters")

    def columns(self) -> dict[str, Any]:
        """What of a channel may be changed later, too."""
        usual_s = 0.0 if self.kind in (WEBHOOK, HEARTBEAT) else GROUP_S
        return {
            "name": self.name, "url": self.url, "min_severity": self.min_severity, "projects": json.dumps(self.projects),
            "tags": json.dumps(self.tags), "group_s": usual_s if self.group_s is None else self.group_s,
            "repeat_s": self.repeat_s, "summaries": self.summaries, "every_s": self.every_s,
            "language": self.language,
        }  # fmt: skip


def check_url(kind: str, url: str, guard: Guard) -> None:
    """Raises ConfigError for what is no address of this kind, AddressNotAllowed for one that must be none."""
    if kind in CHAT_KINDS:
        chat.check(kind, url, guard)
    else:
        guard.check_url(url)


def create(connection: Connection, new: NewChannel, now: float) -> tuple[str, str]:
    """Writes a channel; its id and secret, which only a webhook has."""
    identifier = "ch_" + uuid.uuid4().hex[:20]
    secret = (new.secret or new_secret()) if new.kind == WEBHOOK else ""
    connection.execute(
        insert(channel).values(
            id=identifier, kind=new.kind, secret=secret, enabled=True, disabled_reason="", created=now, told=now, **new.columns()
        )
    )  # fmt: skip
    return identifier, secret


def change(connection: Connection, identifier: str, changed: NewChannel, *, enabled: bool | None) -> None:
    """Sets a channel as `changed` says; its secret stays."""
    connection.execute(update(channel).where(channel.c.id == identifier).values(**changed.columns()))
    if enabled is not None:
        set_enabled(connection, identifier, enabled=enabled, reason="" if enabled else "switched off by hand")


def read(connection: Connection, identifier: str) -> NewChannel | None:
    """A channel as it is set; None when there is none of that id."""
    row = connection.execute(select(channel).where(channel.c.id == identifier)).mappings().first()
    if row is None:
        return None
    lists: dict[str, Any] = {name: stored_names(row[name]) for name in ("projects", "tags")}
    plain = ("name", "url", "kind", "min_severity", "group_s", "repeat_s", "every_s", "language")
    return NewChannel(**{name: row[name] for name in plain}, **lists, summaries=bool(row["summaries"]))


def rotate(connection: Connection, identifier: str, now: float) -> str | None:
    """A new secret for a webhook; those before sign beside it for a day. None for a channel that has none."""
    columns = channel.c.secret, channel.c.old_secret_until
    row = connection.execute(select(*columns).where(channel.c.id == identifier, channel.c.kind == WEBHOOK)).first()
    if row is None or not row.secret:
        return None
    new, sign = new_secret(), row.secret.split()
    before = sign if now < (row.old_secret_until or 0.0) else sign[:1]
    values = {"secret": " ".join([new, *before[:_MOST_SECRETS]]), "old_secret_until": now + ROTATION_S}
    connection.execute(update(channel).where(channel.c.id == identifier).values(**values))
    return new


def all_channels(connection: Connection) -> list[dict[str, Any]]:
    """Every channel, oldest first, without its secret."""
    rows = connection.execute(select(channel).order_by(channel.c.created, channel.c.id)).mappings()
    return [_shown(row) for row in rows]


def _shown(row: RowMapping) -> dict[str, Any]:
    return {
        "id": row["id"], "name": row["name"], "kind": row["kind"], "url": shown_url(row["kind"], row["url"]),
        "min_severity": row["min_severity"], "projects": stored_names(row["projects"]), "tags": stored_names(row["tags"]),
        "group_s": row["group_s"], "repeat_s": row["repeat_s"], "summaries": bool(row["summaries"]), "every_s": row["every_s"],
        "language": row["language"],
        "enabled": bool(row["enabled"]), "disabled_reason": row["disabled_reason"], "created": rfc3339(row["created"]),
        "failing_since": rfc3339(row["failing_since"]), "old_secret_until": rfc3339(row["old_secret_until"]),
    }  # fmt: skip


def shown_url(kind: str, url: str) -> str:
    """The address of a channel as people may see it."""
    if kind == WEBHOOK:
        address, has_query, _ = url.partition("?")  # some receivers want a token in the query, some in the path
        scheme, separator, rest = address.partition("://")
        host, *path = rest.split("/")
        return f"{scheme}{separator}" + "/".join([host, *map(_without_token, path)]) + ("?..." if has_query else "")
    if kind == HEARTBEAT:
        return "/".join(url.split("/")[:3]) + "/..."  # the rest says whose it is
    return chat.masked(kind, url)


def _without_token(part: str) -> str:
    """A part of a path; of what may be a token, its first four characters."""
    has_digit = any(one.isdigit() for one in part)
    return f"{part[:4]}..." if len(part) >= (_TOKEN_CHARACTERS if has_digit else _LONG_CHARACTERS) else part


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
            due=0.0, error="",
        )
    )  # fmt: skip
    return message_id
