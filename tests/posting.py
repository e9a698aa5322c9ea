"""Stands where the server posts to its channels: in this process, with the answers that a test chooses."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from builders import Delivery

from perfagent_server.security.outbound import Guard, Reply

__all__ = ["Posts"]


class Posts:
    """Every channel's receiver. answer(n): the status for the n-th message, counted from 1; or what it raises."""

    url = "https://8.8.8.8/hook"  # no resolver is asked for it

    def __init__(self, answer: Callable[[int], int] = lambda _: 200) -> None:
        self.answer, self.deliveries, self.urls, self._lock = answer, list[Delivery](), list[str](), threading.Lock()

    def __call__(self, guard: Guard, url: str, body: bytes, headers: dict[str, str]) -> Reply:
        with self._lock:
            self.urls.append(url)
            status = self.answer(len(self.urls))
            self.deliveries.append(Delivery(headers, body, time.time(), status))
        return Reply(status, {})

    def of_type(self, kind: str) -> list[Delivery]:
        return [one for one in list(self.deliveries) if one.json.get("type") == kind]

    @property
    def arrived(self) -> list[str]:
        """The events that were answered with 200, in their order."""
        return [str(one.json["type"]).removeprefix("alert.") for one in self.deliveries if one.status == 200]
