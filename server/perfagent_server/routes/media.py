"""Routes for images, audio, tables and histograms of a run. A browser never executes what they return."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query, Request
from starlette.responses import Response

from perfagent.wire.limits import MAX_STEP
from perfagent.wire.media import JSON_TYPE
from perfagent_server.routes.dependencies import SeenRun, ServicesDep
from perfagent_server.routes.problems import ApiError
from perfagent_server.routes.reply import reply
from perfagent_server.security.access import require
from perfagent_server.store.media import HistogramOfStep, MediaItem, MediaName

__all__ = ["router"]

router = APIRouter()

_READ = [Depends(require("read"))]
_INERT = "default-src 'none'; sandbox"
"""Policy of what is opened by itself: nothing is loaded, nothing runs."""
_FOR_EVER = "private, max-age=31536000, immutable"

Name = Annotated[str | None, Query(max_length=256)]
Step = Annotated[int | None, Query(ge=0, le=MAX_STEP)]
Id = Annotated[int | None, Query(ge=1, le=MAX_STEP)]
MediaId = Annotated[int, Path(ge=1, le=MAX_STEP)]
Limit = Annotated[int, Query(ge=1, le=1000)]


@dataclass
class MediaList:
    """names: all that the run has; media: items, newest first, or those of one step in their order; next: `before` of the
    page behind it; left_out: how many the agents could not send."""

    names: list[MediaName]
    media: list[MediaItem]
    next: int | None
    left_out: int


@dataclass
class HistogramList:
    histograms: list[HistogramOfStep]


@router.get("/runs/{run}/media", dependencies=_READ, responses={200: {"model": MediaList}})
def list_media(
    run: SeenRun, services: ServicesDep, name: Name = None, at: Step = None, before: Id = None, limit: Limit = 100
) -> Response:
    """The media that a run has logged, without the bytes. `name`: under that name; `at`: of its last step up to this
    one.
    """
    found = services.media.items(run, name, at, before, limit)
    more = found[-1].id if len(found) == limit and at is None else None
    names = services.media.names(run)
    return reply({"names": names, "media": found, "next": more, "left_out": services.media.left_out(run)})


@router.get("/runs/{run}/media/histograms", dependencies=_READ, responses={200: {"model": HistogramList}})
def histograms(
    run: SeenRun, services: ServicesDep, name: Annotated[str, Query(max_length=256)], limit: Limit = 100
) -> Response:
    """The histograms of a name at no more than `limit` evenly spaced steps, oldest first."""
    return reply({"histograms": services.media.histograms(run, name, limit)})


@router.get(
    "/runs/{run}/media/{media}",
    dependencies=_READ,
    response_class=Response,
    responses={200: {"content": {"*/*": {"schema": {"type": "string", "format": "binary"}}}}},
)
def media_bytes(run: SeenRun, media: MediaId, request: Request, services: ServicesDep) -> Response:
    """The bytes of one item: PNG, JPEG, WebP or GIF; WAV, MP3 or OGG; JSON of a table or a histogram. They never
    change.
    """
    tag = f'"{media}"'
    headers = {
        "Cache-Control": _FOR_EVER,
        "Content-Disposition": "inline",
        "Content-Security-Policy": _INERT,
        "ETag": tag,
    }
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    found = services.media.get(run, media)
    if found is None:
        raise ApiError(404, "not_found", f"this run has no media {media}; GET .../media lists them", "media")
    if found[0] != JSON_TYPE:
        headers["Content-Encoding"] = "identity"  # compressed already: nobody should do it again on the way
    return Response(found[1], media_type=found[0], headers=headers)
