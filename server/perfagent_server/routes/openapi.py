"""The OpenAPI document, made to say what is true: FastAPI cannot know our error shape nor how we spell a number that is
none."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

__all__ = ["document"]

_OURS = ("/api/v1/", "/healthz", "/livez", "/readyz", "/metrics")
_OPEN = ("/healthz", "/livez", "/readyz")
_NUMBER = {"anyOf": [{"type": "number"}, {"type": "string", "enum": ["NaN", "Infinity", "-Infinity"]}]}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["code", "message"],
            "properties": {"code": {"type": "string"}, "message": {"type": "string"}, "field": {"type": "string"}},
        }
    },
}


def document(app: FastAPI) -> dict[str, Any]:
    """Made at the first request and kept in the app."""
    if app.openapi_schema is None:
        made = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        made["paths"] = {path: item for path, item in made["paths"].items() if path.startswith(_OURS)}
        _correct(made)
        app.openapi_schema = made
    return app.openapi_schema


def _correct(made: dict[str, Any]) -> None:
    components = made.setdefault("components", {})
    schemas: dict[str, Any] = components.setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    asked: set[str] = set()
    for path, item in made["paths"].items():
        for operation in item.values():
            _references(operation.get("requestBody"), asked)
            responses = operation["responses"]
            responses.pop("422", None)
            for status, response in responses.items():
                responses[status] = _spelled(response)
            responses["4XX"] = {
                "description": "The request cannot be done; the message says why",
                "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
            }
            if not path.startswith(_OPEN):
                operation["security"] = [{"key": []}, {}]
    for name, schema in schemas.items():
        if name not in asked:
            schemas[name] = _spelled(schema)
    schemas["Error"] = _ERROR
    components["securitySchemes"] = {
        "key": {"type": "http", "scheme": "bearer", "description": "an API key, or the admin token"}
    }


def _references(node: Any, found: set[str]) -> None:
    if isinstance(node, dict):
        if isinstance(node.get("$ref"), str):
            found.add(node["$ref"].rpartition("/")[2])
        for value in node.values():
            _references(value, found)
    elif isinstance(node, list):
        for value in node:
            _references(value, found)


def _spelled(node: Any) -> Any:
    """The schema with every number as we write it: also NaN, as text."""
    if isinstance(node, list):
        return [_spelled(item) for item in node]
    if not isinstance(node, dict):
        return node
    if node.get("type") == "number":
        return {**{key: value for key, value in node.items() if key != "type"}, **_NUMBER}
    return {key: _spelled(value) for key, value in node.items()}
