"""Serves what pages load: our own scripts and styles, and those of the component libraries, each compressed once.

An address holds a hash or a version of what it leads to, so that browsers keep it for ever.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import mimetypes
import pkgutil
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import brotli
from dash.fingerprint import check_fingerprint
from starlette.requests import Request
from starlette.responses import Response

if TYPE_CHECKING:
    from dash import Dash
    from fastapi import FastAPI

__all__ = ["Assets", "serve_suites"]

_FOR_EVER = "public, max-age=31536000, immutable"
_CHECK = "no-cache"  # kept, but asked for every time
_QUALITY = 9  # of brotli: 11 makes plotly a tenth smaller in twenty times the time
_WORTH_BYTES = 1024

mimetypes.add_type("text/javascript", ".mjs")


class _Compressed:
    """Bodies as they go out, by name and encoding."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str], bytes] = {}

    async def response(self, request: Request, name: str, body: bytes, *, for_ever: bool) -> Response:
        kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
        tag = f'"{hashlib.sha256(body).hexdigest()[:16]}"'
        headers = {"Cache-Control": _FOR_EVER if for_ever else _CHECK, "ETag": tag, "Vary": "Accept-Encoding"}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        encoding = _encoding(request) if len(body) >= _WORTH_BYTES and not kind.startswith("image/png") else ""
        if encoding:
            key = f"{name} {tag}", encoding
            if key not in self._kept:
                self._kept[key] = await asyncio.to_thread(_compress, body, encoding)
            body, headers["Content-Encoding"] = self._kept[key], encoding
        return Response(body, headers=headers, media_type=kind)


def _encoding(request: Request) -> str:
    accepted = request.headers.get("accept-encoding", "")
    return next((one for one in ("br", "gzip") if one in accepted), "")


def _compress(body: bytes, encoding: str) -> bytes:
    return brotli.compress(body, quality=_QUALITY) if encoding == "br" else gzip.compress(body, 6, mtime=0)


class Assets:
    """Our own files, at `/assets/HASH/...`: modules import each other by relative addresses, so that all of them are
    loaded anew when one has changed. `/assets/NAME` leads to the newest."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._compressed = _Compressed()

    @cached_property
    def version(self) -> str:
        known = hashlib.sha256()
        for file in sorted(self._files):
            known.update(file.encode() + b"\0" + self._read(file) + b"\0")
        return known.hexdigest()[:12]

    @cached_property
    def _files(self) -> frozenset[str]:
        return frozenset(str(file.relative_to(self._folder)) for file in self._folder.rglob("*") if file.is_file())

    def _read(self, file: str) -> bytes:
        return (self._folder / file).read_bytes()

    @property
    def modules(self) -> list[str]:
        """Our scripts, those in folders: they are modules, and one of them leads to all."""
        return sorted(file for file in self._files if file.endswith(".js") and "/" in file)

    def url(self, file: str) -> str:
        return f"/assets/{self.version}/{file}"

    def serve(self, api: FastAPI) -> None:
        async def asset(request: Request) -> Response:
            path = request.path_params["path"]
            version, _, rest = path.partition("/")
            file, for_ever = (rest, True) if version == self.version else (path, False)
            if file not in self._files:
                return Response("there is no such file", 404, media_type="text/plain")
            return await self._compressed.response(request, file, self._read(file), for_ever=for_ever)

        api.add_api_route("/assets/{path:path}", asset, methods=["GET", "HEAD"], include_in_schema=False)


def serve_suites(api: FastAPI, dash_of: Sequence[Dash]) -> None:
    """Takes the place of Dash's own route to the files of component libraries, which compresses nothing.

    dash_of: holds the Dash app once there is one; this route must be there before.
    """
    compressed = _Compressed()

    async def suite(request: Request) -> Response:
        package, path = request.path_params["package"], request.path_params["path"]
        file, has_version = check_fingerprint(path)  # type: ignore[no-untyped-call]
        if not dash_of or file not in dash_of[0].registered_paths.get(package, ()):
            return Response("there is no such file", 404, media_type="text/plain")
        body = await asyncio.to_thread(pkgutil.get_data, package, file)
        if body is None:
            return Response("there is no such file", 404, media_type="text/plain")
        return await compressed.response(request, f"{package}/{file}", body, for_ever=has_version)

    path = "/_dash-component-suites/{package}/{path:path}"
    api.add_api_route(path, suite, methods=["GET", "HEAD"], include_in_schema=False)
