"""POST /ingest: frames of agents, binary. No pydantic and no work per sample here: it runs a thousand times a
second."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from perfagent_server.event_data import Rejected
from perfagent_server.ingest.decode import read_body
from perfagent_server.routes.admission import check_key, check_project, check_rank, sender_of_runs, take
from perfagent_server.routes.dependencies import ServicesDep
from perfagent_server.routes.problems import ApiError
from perfagent_server.routes.reply import reply
from perfagent_server.runs.left_runs import may_be_left
from perfagent_server.security.access import require
from perfagent_server.security.rights import Identity
from perfagent_server.store.interface import Receipt

__all__ = ["checked", "receipt_reply", "router"]

router = APIRouter()

UNWATCHED = {"Perfagent-Watched": "0"}
"""Tells an agent that no page shows its run: whole frames every three seconds will do."""

_MEDIA_TYPES = ("application/x-msgpack", "application/msgpack", "application/vnd.msgpack", "application/octet-stream")

_REPLY_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["stored", "duplicate", "rejected", "commands"],
    "properties": {
        "stored": {"type": "integer"},
        "duplicate": {"type": "integer"},
        "rejected": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["name", "reason", "count"],
                "properties": {"name": {"type": "string"}, "reason": {"type": "string"}, "count": {"type": "integer"}},
            },
        },
        "commands": {"type": "array", "items": {"type": "object"}},
    },
}


# Agents keep what is answered 403 and try again with another key; what is answered 422 they set aside.
_STATUS = {"forbidden": 403, "source_in_use": 422}


def checked(receipts: list[Receipt]) -> list[Receipt]:
    """Raises ApiError where a frame was refused."""
    for receipt in receipts:
        if receipt.refused is not None:
            refused = receipt.refused
            raise ApiError(_STATUS[refused.code], refused.code, refused.message, refused.field)
    return receipts


def receipt_reply(
    receipts: list[Receipt], commands: Sequence[dict[str, Any]] = (), events: Sequence[Rejected] = ()
) -> dict[str, Any]:
    """What a sender is told; counts are samples, and events of those that were rejected."""
    return {
        "stored": sum(receipt.stored for receipt in receipts),
        "duplicate": sum(receipt.duplicate for receipt in receipts),
        "rejected": [
            {"name": item.name, "reason": item.reason, "count": item.count}
            for item in (*(item for receipt in receipts for item in receipt.rejected), *events)
        ],
        "commands": list(commands),
    }


@router.post(
    "/ingest",
    summary="Store one frame of an agent",
    description="A MessagePack frame (docs/reference/wire.md), optionally deflated. The answer comes after the commit.",
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {"application/x-msgpack": {"schema": {"type": "string", "format": "binary"}}},
        }
    },
    responses={
        200: {
            "content": {"application/json": {"schema": _REPLY_SCHEMA}},
            "headers": {
                "Perfagent-Watched": {
                    "description": "`0` while no page shows the run: the agent may send a third as often",
                    "schema": {"type": "string"},
                }
            },
        }
    },
)
async def ingest(request: Request, services: ServicesDep, identity: Identity = Depends(require("ingest"))) -> Response:  # noqa: B008
    media_type = request.headers.get("content-type", "application/x-msgpack").partition(";")[0].strip().lower()
    if media_type not in _MEDIA_TYPES:
        raise ApiError(
            415,
            "unsupported_media_type",
            f"Content-Type is {media_type[:80]!r}; application/x-msgpack is needed",
            "content-type",
        )
    check_key(services, identity)
    body = await request.body()
    limit = services.settings.max_decoded_bytes
    frame, rejected, size = await read_body(body, request.headers.get("content-encoding"), max_decoded_bytes=limit)
    check_project(identity, (frame.project,))
    check_rank(services, frame.rank)
    take(services, identity, frame.run, samples=frame.samples, size_bytes=size)
    await services.new_runs.admit(sender_of_runs(services, identity), frame.run, frame.project)
    receipts = checked(await services.ingest.accept([frame], limited=identity.project is not None))
    if rejected and not receipts[0].again:
        services.ingest.counters["rejected_events"] += sum(item.count for item in rejected)
    if may_be_left(frame):
        await asyncio.to_thread(services.remove_if_left, frame.run)
    headers = None if services.is_watched(frame.run, frame.project) else UNWATCHED
    return reply(receipt_reply(receipts, await services.orders.for_frame(frame), rejected), headers=headers)
