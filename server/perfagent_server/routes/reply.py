"""How every route answers: JSON in which non-finite numbers are spelled out and no text can fail to encode."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from perfagent.wire import plain, to_json

__all__ = ["reply"]


def reply(value: Any, status: int = 200, *, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON response of a plain value or a wire dataclass."""
    try:
        body = to_json(value)
    except (UnicodeError, OverflowError):
        body = json.dumps(_readable(plain(value))).encode()
    return Response(body, status, headers=dict(headers) if headers else None, media_type="application/json")


def _readable(value: Any) -> Any:
    """Lone surrogates, which UTF-8 cannot hold, become question marks: an answer may quote what somebody sent."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {_readable(key): _readable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_readable(item) for item in value]
    return value
