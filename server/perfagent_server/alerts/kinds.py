"""The kinds of channels. Light, for the command line."""

from __future__ import annotations

__all__ = ["CHAT_KINDS", "HEARTBEAT", "KINDS", "WEBHOOK"]

WEBHOOK, HEARTBEAT = "webhook", "heartbeat"
CHAT_KINDS = ("slack", "discord", "teams", "feishu", "dingtalk", "wecom", "email")
KINDS = (WEBHOOK, *CHAT_KINDS, HEARTBEAT)
