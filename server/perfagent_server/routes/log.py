"""POST /log: samples as JSON, for curl and for programs without the agent. See log_rows.py for what a row becomes."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from perfagent_server.ingest.decode import LARGE_BYTES
from perfagent_server.ingest.json_rows import STATES, LogRow, parse_rows, plain_rows
from perfagent_server.routes.admission import check_key, check_project, check_rank, sender_of_runs, take
from perfagent_server.routes.dependencies import ServicesDep
from perfagent_server.routes.ingest import checked, receipt_reply
from perfagent_server.routes.problems import ApiError, not_json
from perfagent_server.routes.reply import reply
from perfagent_server.security.access import require
from perfagent_server.security.rights import Identity

__all__ = ["router"]

router = APIRouter()

_ROW_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["run"],
    "anyOf": [{"required": [name]} for name in ("metrics", "state", "config", "tags", "group")],
    "properties": {
        "project": {"type": "string", "default": "default", "minLength": 1, "maxLength": 256},
        "run": {
            "type": "string",
            "description": "a name; the run is created when it is missing",
            "minLength": 1,
            "maxLength": 256,
        },
        "step": {"type": "integer", "description": "left out: one more than the last", "minimum": 0, "maximum": 2**53},
        "metrics": {
            "type": "object",
            "additionalProperties": {
                "anyOf": [{"type": "number"}, {"type": "string", "enum": ["NaN", "Infinity", "-Infinity"]}]
            },
        },
        "rank": {"type": "integer", "default": 0, "minimum": 0, "maximum": 2**31 - 1},
        "time": {"type": "number", "description": "Unix seconds; left out: now"},
        "state": {
            "type": "string",
            "enum": list(STATES),
            "description": "starting: a new run of this name begins here; the others: how this rank ended",
        },
        "reason": {"type": "string", "description": "why it ended"},
        "config": {"type": "object", "description": "settings of the run"},
        "tags": {"type": "array", "items": {"type": "string", "minLength": 1}},
        "group": {"type": "string", "description": "runs that belong together", "maxLength": 256},
    },
}
_REPLY_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["stored", "duplicate", "rejected", "runs"],
    "properties": {
        "stored": {"type": "integer"},
        "duplicate": {"type": "integer"},
        "rejected": {"type": "array", "items": {"type": "object"}},
        "runs": {"type": "array", "items": {"type": "object"}},
    },
}


@router.post(
    "/log",
    summary="Store samples given as JSON",
    description="Stores one row of samples, or a list of rows, for programs without an agent (docs/reference/wire.md).",
    openapi_extra={
        "parameters": [
            {
                "name": "Idempotency-Key",
                "in": "header",
                "required": False,
                "schema": {"type": "string", "maxLength": 200},
            }
        ],
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {"schema": {"anyOf": [_ROW_SCHEMA, {"type": "array", "items": _ROW_SCHEMA}]}}
            },
        },
    },
    responses={200: {"content": {"application/json": {"schema": _REPLY_SCHEMA}}}},
)
async def log(request: Request, services: ServicesDep, identity: Identity = Depends(require("ingest"))) -> Response:  # noqa: B008
    media_type = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise not_json(media_type)
    key = request.headers.get("idempotency-key")
    if key is not None and not 1 <= len(key) <= 200:
        raise ApiError(
            400,
            "bad_request",
            f"the Idempotency-Key has {len(key)} characters; 1 to 200 are allowed",
            "idempotency-key",
        )
    check_key(services, identity)
    body = await request.body()
    rows = await asyncio.to_thread(_rows, body) if len(body) > LARGE_BYTES else _rows(body)
    check_project(identity, (row.project for row in rows))
    for row in rows:
        check_rank(services, row.rank)
    if rows:
        samples = sum(len(row.metrics) for row in rows)
        take(services, identity, rows[0].run, samples=samples, size_bytes=len(body))
    receipts, runs = await services.log_rows.accept(
        rows,
        sender=sender_of_runs(services, identity),
        body=body,
        key=key,
        limited=identity.project is not None,
    )
    answer = receipt_reply(checked(receipts))
    if len(runs) == 1:
        answer.update(runs[0])
    return reply({**answer, "runs": runs})


def _rows(body: bytes) -> list[LogRow]:
    rows = plain_rows(body)
    return parse_rows(parse_json(body)) if rows is None else rows


def parse_json(body: bytes) -> Any:
    """JSON, and beyond it the bare NaN and Infinity that Python's own encoder writes. Raises ApiError."""
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        pass
    try:
        value = json.loads(body)
        # A lone surrogate has no UTF-8, so neither the database nor an answer could hold it.
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise ApiError(400, "bad_request", f"the body is not valid JSON: {str(error)[:200]}") from None
    return value
