"""Checks that run before the API's routes. They refuse query parameters that a route does not have, or takes once and got
twice, because a filter that does not count must not answer with everything; and NUL characters, which PostgreSQL cannot store.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, get_args, get_origin

from fastapi import Request

from perfagent_server.routes.problems import ApiError

__all__ = ["no_nul", "only_known"]

_NUL = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")  # in JSON: an escape, whose backslash is not escaped itself


async def only_known(request: Request) -> None:
    """A dependency of routes. Asynchronous, so that it takes no worker thread."""
    if b"%00" in request.scope["query_string"] or "\x00" in request.scope["path"]:
        raise ApiError(400, "bad_request", "the address holds a NUL character (%00); leave it out")
    if not request.scope["query_string"]:
        return
    allowed = dict(_declared(request.scope["route"].dependant))
    unknown = next((name for name in request.query_params if name not in allowed), None)
    if unknown is not None:
        takes = f"allowed are {', '.join(allowed)}" if allowed else "there are none here"
        raise ApiError(422, "invalid", f"there is no query parameter {unknown[:80]!r}; {takes}", unknown[:80])
    twice = next(
        (name for name, many in allowed.items() if not many and len(request.query_params.getlist(name)) > 1), None
    )
    if twice is not None:
        raise ApiError(422, "invalid", f"{twice} is given more than once, and may be given once", twice)


async def no_nul(request: Request) -> None:
    """A dependency of routes that take JSON."""
    if request.method in ("GET", "HEAD") or not _NUL.search(await request.body()):
        return
    try:
        fields = (await request.json()).items()
    except (ValueError, AttributeError):  # no JSON, or no object: the route says so
        return
    found = next((name for name, value in fields if "\x00" in f"{name}{value}"), "body")
    raise ApiError(400, "bad_request", "a text in the body holds a NUL character (\\u0000); leave it out", found[:80])


def _declared(dependant: Any) -> Iterator[tuple[str, bool]]:
    """By a route and whatever it depends on: name, and whether there may be several."""
    for field in dependant.query_params:
        kind = field.field_info.annotation
        yield field.alias, any(get_origin(one) in (list, Sequence) for one in (kind, *get_args(kind)))
    for other in dependant.dependencies:
        yield from _declared(other)
