"""Why something that was asked for is refused, in words; routes/problems.py makes a response of it.

A part of the server below the routes raises this, and knows nothing of HTTP.
"""

from __future__ import annotations

from typing import Literal

__all__ = ["RefusalError", "Why"]

Why = Literal[
    "bad_request", "unauthorized", "forbidden", "key_reused", "too_many_failures", "too_many_requests",
    "provider_unreachable",
]  # fmt: skip


class RefusalError(Exception):
    """why: one word for programs; message: what was given, what is allowed, what to do; field: the part of the request
    that it is about; retry_after_s: when to ask again."""

    def __init__(self, why: Why, message: str, field: str | None = None, *, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.why, self.message, self.field, self.retry_after_s = why, message, field, retry_after_s
