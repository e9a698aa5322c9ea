"""Serves what pages load: our own scripts and styles, joined into one file each, and those of the component libraries. Each is
compressed once.

An address holds a hash or a version of what it leads to, so that browsers keep it for ever.
"""

from __future__ import annotations

import asyncio
import base64
import gzip
import hashlib
import mimetypes
import pkgutil
import posixpath
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import brotli
from dash.fingerprint import check_fingerprint
from starlette.requests import Request
from starlette.responses import Response

if TYPE_CHECKING:
    from dash import Dash
    from fastapi import FastAPI

__all__ = ["LIBRARIES", "Assets", "serve_suites"]

LIBRARIES = "perfagent"
"""Stands for a package in the addresses of component libraries: their scripts in one file, and what that file fetches later."""

_FOR_EVER = "public, max-age=31536000, immutable"
_CHECK = "no-cache"  # kept, but asked for every time
_QUALITY = 9  # of brotli: 11 makes plotly a tenth smaller in twenty times the time
_WORTH_BYTES = 1024
_IMPORT = re.compile(r'^import (?:\{[^}]*\} from )?"([^"]+)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|const|let|class)\b)", re.MULTILINE)
_ICON = re.compile(r"url\(([\w/]+\.svg)\)")

mimetypes.add_type("text/javascript", ".mjs")


class _Compressed:
    """Bodies as they go out, by name and encoding."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str], bytes] = {}

    async def response(self, request: Request, name: str, body: bytes, *, for_ever: bool) -> Response:
        kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
        tag = f'"{_hash(body)}"'
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


def _hash(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()[:16]


def _encoding(request: Request) -> str:
    accepted = request.headers.get("accept-encoding", "")
    return next((one for one in ("br", "gzip") if one in accepted), "")


def _compress(body: bytes, encoding: str) -> bytes:
    return brotli.compress(body, quality=_QUALITY) if encoding == "br" else gzip.compress(body, 6, mtime=0)


class Assets:
    """Our own files at `/assets/HASH/NAME`; `/assets/NAME` leads to the newest. `add` puts a file beside those of the
    folder."""

    def __init__(self, folder: Path) -> None:
        files = (file for file in folder.rglob("*") if file.is_file())
        self._files = {str(file.relative_to(folder)): file.read_bytes() for file in files}
        self._compressed = _Compressed()

    def add(self, name: str, text: str) -> None:
        self._files[name] = text.encode()

    def text(self, name: str) -> str:
        return self._files[name].decode()

    def url(self, name: str) -> str:
        return f"/assets/{_hash(self._files[name])}/{name}"

    def script(self, first: str) -> str:
        """One module of all that a module leads to, each after those that it imports. They share a scope, so no two may
        have a name of their own twice: the browser would refuse the script."""
        modules: dict[str, str] = {}

        def read(name: str) -> None:
            source = self.text(name)
            modules[name] = ""  # an import that leads in a circle ends here
            for path in _IMPORT.findall(source):
                if (imported := posixpath.normpath(posixpath.join(posixpath.dirname(name), path))) not in modules:
                    read(imported)
            del modules[name]
            modules[name] = _EXPORT.sub("", _IMPORT.sub("", source))

        read(first)
        return "\n".join(modules.values())

    def style(self) -> str:
        """All styles, with the icons in them."""

        styles = [self.text(name) for name in sorted(self._files) if name.endswith(".css")]
        return _ICON.sub(lambda found: f"url({self.inlined(found[1])})", "\n".join(styles))

    def inlined(self, icon: str) -> str:
        return f"data:image/svg+xml;base64,{base64.b64encode(self._files[icon]).decode()}"

    def serve(self, api: FastAPI) -> None:
        async def asset(request: Request) -> Response:
            path = request.path_params["path"]
            version, _, rest = path.partition("/")
            for_ever = rest in self._files and version == _hash(self._files[rest])
            file = rest if for_ever else path
            if file not in self._files:
                return Response("there is no such file", 404, media_type="text/plain")
            return await self._compressed.response(request, file, self._files[file], for_ever=for_ever)

        api.add_api_route("/assets/{path:path}", asset, methods=["GET", "HEAD"], include_in_schema=False)


def serve_suites(api: FastAPI, dash_of: Sequence[Dash], joined: Mapping[str, bytes]) -> None:
    """Takes the place of Dash's own route to the files of component libraries, which compresses nothing.

    dash_of: holds the Dash app once there is one; this route must be there before. joined: the scripts of several libraries,
    by name, once they are.
    """
    compressed = _Compressed()

    async def suite(request: Request) -> Response:
        package, path = request.path_params["package"], request.path_params["path"]
        if package == LIBRARIES and path in joined:
            return await compressed.response(request, path, joined[path], for_ever=True)
        file, has_version = check_fingerprint(path)  # type: ignore[no-untyped-call]
        package, file = _found(dash_of, package, file)
        body = await asyncio.to_thread(pkgutil.get_data, package, file) if file else None
        if body is None:
            return Response("there is no such file", 404, media_type="text/plain")
        return await compressed.response(request, f"{package}/{file}", body, for_ever=has_version)

    path = "/_dash-component-suites/{package}/{path:path}"
    api.add_api_route(path, suite, methods=["GET", "HEAD"], include_in_schema=False)


def _found(dash_of: Sequence[Dash], package: str, file: str) -> tuple[str, str]:
    """The package and path of a file. The joined script fetches parts by their bare names; empty: there is no such file."""
    registered = dash_of[0].registered_paths if dash_of else {}
    if package == LIBRARIES:
        named = (
            (name, path) for name, paths in registered.items() for path in paths if posixpath.basename(path) == file
        )
        return next(named, ("", ""))
    return (package, file) if file in registered.get(package, ()) else ("", "")
