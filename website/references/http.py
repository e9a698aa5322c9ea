"""docs/reference/http.md: each route of the server, from its OpenAPI document."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from perfagent_server.app import create_app
from perfagent_server.settings import Settings
from references.markdown import note, table

__all__ = ["http"]

_HEAD = """# HTTP

{note}
Every route of the server. A running server shows the same at `/docs`, and as OpenAPI at `/openapi.json`. Who may use a route:
[authorization](authorization.md). Bodies, answers and errors in detail: [wire format](wire.md). A key goes into the header
`Authorization: Bearer pfa_...`.
"""


def http() -> str:
    """The page."""
    with tempfile.TemporaryDirectory() as folder:
        document = create_app(Settings(data=Path(folder))).openapi()
    parts = [_HEAD.format(note=note("the server's OpenAPI document"))]
    for tag, routes in _by_tag(document).items():
        parts.append(f"## {tag.replace('_', ' ').capitalize()}\n")
        parts += [piece for method, path, route in routes for piece in _route(method, path, route)]
    return "\n".join(parts)


def _by_tag(document: dict[str, Any]) -> dict[str, list[tuple[str, str, dict[str, Any]]]]:
    tags: dict[str, list[tuple[str, str, dict[str, Any]]]] = {}
    for path, methods in document["paths"].items():
        for method, route in methods.items():
            tags.setdefault((route.get("tags") or ["server"])[0], []).append((method.upper(), path, route))
    return tags


def _route(method: str, path: str, route: dict[str, Any]) -> Iterator[str]:
    yield f"### `{method} {path}`\n"
    text = " ".join((route.get("description") or route["summary"]).split())
    text = re.sub(r"\bdocs/reference/(\w+)\.md\b", r"[\1.md](\1.md)", text)
    yield text + "\n"
    rows = [
        (f"`{at['name']}`", at["in"], _type(at.get("schema", {})), "yes" if at.get("required") else "")
        for at in route.get("parameters", ())
    ]
    if rows:
        yield table(("parameter", "in", "type", "required"), rows)


def _type(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(_type(one) for one in schema["anyOf"] if one.get("type") != "null")
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    return str(schema.get("format") or schema.get("type") or "any")
