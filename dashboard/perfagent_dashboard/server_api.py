"""The server's API as the pages use it: with what the viewer's own request carries, so that a page never shows or does
what its viewer may not. In this process, without a socket."""

from __future__ import annotations

from typing import Any

import httpx
from dash.backends._fastapi import get_current_request
from fastapi import FastAPI
from starlette.requests import Request

from perfagent.wire import to_json

__all__ = ["Problem", "ServerApi"]

_PASSED_ON = (
    "accept-language",
    "authorization",
    "x-api-key",
    "cookie",
    "host",
    "origin",
    "sec-fetch-site",
    "x-forwarded-for",
    "user-agent",
)


class Problem(Exception):  # noqa: N818 - the server's word
    """What the server said instead of an answer. status: of HTTP."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


class ServerApi:
    """Requests below /api/v1 in the name of whoever asked for the page, or pressed the button, that is being answered."""

    def __init__(self, api: FastAPI) -> None:
        self._api = api

    async def get(self, path: str, **query: Any) -> Any:
        """The answer's JSON. query: None is left out, a list is repeated. Raises Problem."""
        given = {name.rstrip("_"): value for name, value in query.items() if value not in (None, "", [])}
        return await self.ask("GET", path, query=given)

    async def ask(self, method: str, path: str, body: Any = None, query: dict[str, Any] | None = None) -> Any:
        """The answer's JSON, None for an empty one. Raises Problem."""
        return _read(await self.send(method, f"/api/v1{path}", body, query))

    async def send(
        self, method: str, path: str, body: Any = None, query: dict[str, Any] | None = None
    ) -> httpx.Response:
        viewer: Request = get_current_request()
        headers = {name: value for name in _PASSED_ON if (value := viewer.headers.get(name)) is not None}
        content = None
        if body is not None:
            content, headers["content-type"] = to_json(body), "application/json"
        address = (viewer.client.host, viewer.client.port) if viewer.client else ("127.0.0.1", 0)
        transport = httpx.ASGITransport(app=self._api, client=address, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url=str(viewer.base_url)) as client:
            return await client.request(method, path, params=query, content=content, headers=headers)


def _read(answer: httpx.Response) -> Any:
    try:
        body = answer.json() if answer.content else None
    except ValueError:
        body = None
    if answer.is_success:
        return body
    error = body.get("error") if isinstance(body, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    raise Problem(answer.status_code, str(message or f"the server answered {answer.status_code}"))
