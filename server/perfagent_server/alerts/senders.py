"""One try to send a batch, in the way of its channel's kind."""

from __future__ import annotations

from collections.abc import Callable

from sqlalchemy import RowMapping

from perfagent_server.alerts import chat
from perfagent_server.alerts.batches import Batch
from perfagent_server.alerts.chat_message import message_of
from perfagent_server.alerts.kinds import CHAT_KINDS, HEARTBEAT
from perfagent_server.alerts.outcome import Outcome
from perfagent_server.alerts.webhooks import headers
from perfagent_server.security.outbound import Guard, Reply
from perfagent_server.store.stored_json import stored_number

__all__ = ["Post", "send"]

Post = Callable[[Guard, str, bytes, dict[str, str]], Reply]


def send(guard: Guard, batch: Batch, now: float, post: Post) -> Outcome:
    """Raises what the guard and the network raise."""
    channel = batch.channel
    if channel["kind"] in CHAT_KINDS:
        message = message_of([row["body"] for row in batch.rows], channel["language"])
        return chat.send(channel["kind"], channel["url"], message, guard)
    [row] = batch.rows
    if channel["kind"] == HEARTBEAT:
        return _answered(post(guard, channel["url"], row["body"], {"Content-Type": "application/json"}))
    signed = headers(_secrets(channel, now), row["id"], int(now), row["body"])
    return _answered(post(guard, channel["url"], row["body"], signed))


def _answered(reply: Reply) -> Outcome:
    if 200 <= reply.status < 300:
        return Outcome(reply.status, "")
    what = f"the receiver answered {reply.status}"
    if 300 <= reply.status < 400:
        what += "; redirects are not followed: give the channel the final address"
    return Outcome(reply.status, what, reply.headers.get("retry-after"))


def _secrets(channel: RowMapping, now: float) -> str:
    """All that sign. The old one of a rotation ("new old") does until its time is over."""
    secrets = str(channel["secret"])
    until = stored_number(channel["old_secret_until"])
    return secrets if until is None or now < until else secrets.split(" ")[0]
