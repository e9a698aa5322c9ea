"""Query parameters that a route does not have are refused by name: a misspelt filter must not answer with
everything."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastapi import Request

from perfagent_server.routes.problems import ApiError

__all__ = ["only_known"]


async def only_known(request: Request) -> None:
    """A dependency of routes. Asynchronous, so that it takes no worker thread."""
    if not request.scope["query_string"]:
        return
    allowed = list(_declared(request.scope["route"].dependant))
    unknown = next((name for name in request.query_params if name not in allowed), None)
    if unknown is not None:
        takes = f"allowed are {', '.join(allowed)}" if allowed else "there are none here"
        raise ApiError(422, "invalid", f"there is no query parameter {unknown[:80]!r}; {takes}", unknown[:80])


def _declared(dependant: Any) -> Iterator[str]:
    """By a route and whatever it depends on."""
    yield from (field.alias for field in dependant.query_params)
    for other in dependant.dependencies:
        yield from _declared(other)
