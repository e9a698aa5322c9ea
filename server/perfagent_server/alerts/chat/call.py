"""One send under way: what it may reach, until when, and what was noticed of it. No network and no apprise here."""

from __future__ import annotations

import time
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from perfagent_server.alerts.chat.targets import Target
from perfagent_server.security.outbound import Guard

__all__ = ["Call", "current"]


@dataclass(slots=True)
class Call:
    """The plugins of apprise say yes or no. Why, is noted here by what stands between them and the network.

    status, retry_after, body: of the last answer. failure: why there is no answer, in words. refused: recipients of a mail
    that the server does not take, with its reply. taken: how many it takes. heard: warnings of apprise. over: set when nobody
    waits any more; no request begins after that.
    """

    target: Target
    guard: Guard
    deadline: float
    status: int | None = None
    retry_after: str | None = None
    body: bytes = b""
    failure: str = ""
    refused: dict[str, tuple[int, str]] = field(default_factory=dict)
    taken: int = 0
    heard: list[str] = field(default_factory=list)
    over: bool = False
    mail: Any = None

    def left_s(self) -> float:
        """Seconds until the deadline. Raises TimeoutError when there are none."""
        left = self.deadline - time.monotonic()
        if self.over or left <= 0:
            raise TimeoutError("the total time of a delivery is over")
        return left


current: ContextVar[Call] = ContextVar("perfagent-chat")
"""Of the thread that sends. Several send at once, and neither their errors nor their log records may mix."""
