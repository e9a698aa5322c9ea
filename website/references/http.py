"""docs/reference/http.md: each route of the server, from its OpenAPI document."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from perfagent_server.app import create_app
from perfagent_server.routes.openapi import document
from perfagent_server.settings import Settings
from references.markdown import linked, note, table

__all__ = ["http"]

_HEAD = """# HTTP

{note}
Every route of the server. A running server shows the same at `/docs`, and as OpenAPI at `/openapi.json`. Who may use a route:
[authorization](authorization.md). Errors, frames and events: [wire format](wire.md). A key goes into the header
`Authorization: Bearer pfa_...`.
The [objects](#objects) of bodies and answers stand below the routes; `?` marks a field that may be left out or null.

The REST API from any program, such as Java or a shell. `ID` is the `run` of the list, not its name (a name is answered 404):

```sh
get() {{ curl -H "Authorization: Bearer $PERFAGENT_API_KEY" "$PERFAGENT_SERVER/api/v1$1"; }}
get '/runs?project=mine&limit=100'           # paging: &cursor= with `next` of the answer
get '/runs/ID/export?format=csv'             # all metrics, every sample, also GPU and host
get '/series?run=A&run=B&name=loss'          # many runs; those without it are left out
```

Exports are complete, also of active runs; a series has at most `points` buckets. In Python,
[`client.frame`](python-client.md) downloads the histories of many runs.
"""


def http() -> str:
    """The page."""
    with tempfile.TemporaryDirectory() as folder:
        made = document(create_app(Settings(data=Path(folder))))
    parts = [_HEAD.format(note=note("the server's OpenAPI document"))]
    for tag, routes in _by_tag(made).items():
        parts.append(f"## {tag.replace('_', ' ').capitalize()}\n")
        parts += [piece for method, path, route in routes for piece in _route(method, path, route)]
    parts.append("## Objects\n")
    for name, schema in sorted(made["components"]["schemas"].items()):
        parts.append(f"### `{name}` object\n")
        parts += [f"{linked(' '.join(schema['description'].split()))}\n"] if "description" in schema else []
        parts.append(f"{_fields(schema)}\n")
    return "\n".join(parts)


def _by_tag(made: dict[str, Any]) -> dict[str, list[tuple[str, str, dict[str, Any]]]]:
    tags: dict[str, list[tuple[str, str, dict[str, Any]]]] = {}
    for path, methods in made["paths"].items():
        for method, route in methods.items():
            tags.setdefault((route.get("tags") or ["server"])[0], []).append((method.upper(), path, route))
    return tags


def _route(method: str, path: str, route: dict[str, Any]) -> Iterator[str]:
    yield f"### `{method} {path}`\n"
    yield linked(" ".join((route.get("description") or route["summary"]).split())) + "\n"
    rows = [
        (f"`{at['name']}`", at["in"], _type(at.get("schema", {})), "yes" if at.get("required") else "")
        for at in route.get("parameters", ())
    ]
    if rows:
        yield table(("parameter", "in", "type", "required"), rows)
    answer = next((one for status, one in route["responses"].items() if status.startswith("2")), {})
    for what, has in (("Body", route.get("requestBody", {})), ("Answer", answer)):
        schema = has.get("content", {}).get("application/json", {}).get("schema")
        if schema:
            yield f"{what}: {_type(schema)}\n"


def _fields(schema: dict[str, Any]) -> str:
    needed = schema.get("required", ())
    fields = (f"`{name}`{'' if name in needed else '?'}: {_type(one)}" for name, one in schema["properties"].items())
    return ", ".join(fields)


def _type(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        name = str(schema["$ref"]).rpartition("/")[2]
        return f"[{name}](#{name.lower()}-object)"
    if "properties" in schema:
        return f"({_fields(schema)})"
    if "anyOf" in schema:
        kinds = [
            _type(one) for one in schema["anyOf"] if one.get("type") != "null" and "NaN" not in one.get("enum", ())
        ]
        return " or ".join(dict.fromkeys(kinds)).replace(f" or list of {kinds[0]}", ", or a list of these")
    if "enum" in schema:
        return " or ".join(f"`{value}`" for value in schema["enum"] if value)
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    if isinstance(values := schema.get("additionalProperties"), dict):
        return f"map of {_type(values)}"
    return str(schema.get("format") or schema.get("type") or "any")
