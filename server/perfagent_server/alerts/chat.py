"""placeholder until the senders land"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from perfagent_server.alerts.outcome import Outcome
from perfagent_server.security.outbound import Guard

CHAT_KINDS = ("slack", "discord", "teams", "feishu", "dingtalk", "wecom", "email")


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    title: str
    text: str
    severity: Literal["info", "warning", "critical", "resolved"]
    url: str = ""


def check(kind: str, url: str, guard: Guard) -> None: ...
def masked(kind: str, url: str) -> str:
    return ""


def send(kind: str, url: str, message: Message, guard: Guard) -> Outcome:
    return Outcome(200, "")
