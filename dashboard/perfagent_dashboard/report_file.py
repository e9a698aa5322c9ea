"""`GET /report/<run>`: the report of a run as one HTML file, as `perfagent report` writes it, of what the viewer may see."""

from __future__ import annotations

import asyncio
from urllib.parse import quote

import httpx
from dash.backends._fastapi import reset_current_request, set_current_request
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response

from perfagent_client.client import ApiError, Client
from perfagent_client.report.facts import read_facts
from perfagent_client.report.page import report_html
from perfagent_dashboard.server_api import ServerApi

__all__ = ["serve_reports"]


def serve_reports(api: FastAPI, server: ServerApi, address: str) -> None:
    """address: of the server, for the link from the report to the page."""

    async def report(request: Request) -> Response:
        token = set_current_request(request)  # type: ignore[no-untyped-call]
        try:
            transport = _InThisProcess(server, asyncio.get_running_loop())
            name, html = await asyncio.to_thread(_report, address, transport, request.path_params["run"])
        except ApiError as error:
            return PlainTextResponse(error.message, error.status)
        finally:
            reset_current_request(token)  # type: ignore[no-untyped-call]
        named = f"attachment; filename*=UTF-8''{quote(name, safe=' ')}.html"
        headers = {"Content-Disposition": named, "Cache-Control": "no-store"}
        return HTMLResponse(html.encode("utf-8", "replace"), headers=headers)

    api.add_api_route("/report/{run}", report, methods=["GET"], include_in_schema=False)


def _report(address: str, transport: _InThisProcess, ident: str) -> tuple[str, str]:
    """The run's name, and the HTML."""
    with Client(address, transport=transport) as client:
        run = client.run(ident)
        return run.name or run.run, report_html(read_facts(client, run))


class _InThisProcess(httpx.BaseTransport):
    """For a client on another thread than the server's loop. It asks with the credentials of the viewer, never with its own."""

    def __init__(self, server: ServerApi, loop: asyncio.AbstractEventLoop) -> None:
        self._server, self._loop = server, loop

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        asked = self._server.send(request.method, request.url.raw_path.decode())
        answer = asyncio.run_coroutine_threadsafe(asked, self._loop).result()
        return httpx.Response(answer.status_code, content=answer.content)
