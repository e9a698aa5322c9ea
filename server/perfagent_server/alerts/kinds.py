"""The kinds of channels. Light, for the command line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from perfagent_server.store.stored_json import stored_number

__all__ = ["CHAT_KINDS", "HEARTBEAT", "KINDS", "WEBHOOK", "groups"]

WEBHOOK, HEARTBEAT = "webhook", "heartbeat"
CHAT_KINDS = ("slack", "discord", "teams", "feishu", "dingtalk", "wecom", "email")
KINDS = (WEBHOOK, *CHAT_KINDS, HEARTBEAT)


def groups(channel: Mapping[Any, Any]) -> bool:
    """Whether several alerts of a run go to a channel in one message. A webhook gets each by itself."""
    return bool(stored_number(channel["group_s"])) and channel["kind"] in CHAT_KINDS
