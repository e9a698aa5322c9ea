"""Moments in the query of a question."""

from __future__ import annotations

from perfagent_server.routes.problems import ApiError
from perfagent_server.timestamps import unix_seconds

__all__ = ["time_of"]


def time_of(text: str | None, name: str) -> float | None:
    if text is None:
        return None
    found = unix_seconds(text)
    if found is None:
        raise ApiError(422, "invalid", f"{name} is {text[:40]!r}; give a time as 2026-03-01T12:00:00Z", name)
    return found
