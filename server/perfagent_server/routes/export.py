"""GET /runs/{run}/export: every sample of a run, a row each, streamed. Floats are written so that they read back
exactly."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Iterator
from typing import Annotated

import msgspec
from fastapi import APIRouter, Depends, Query
from starlette.responses import Response, StreamingResponse

from perfagent.wire import LogRow, plain
from perfagent_server.routes import parquet
from perfagent_server.routes.dependencies import SeenRun, ServicesDep
from perfagent_server.routes.problems import ApiError
from perfagent_server.security.access import require

__all__ = ["router"]

router = APIRouter()

_CHUNK_ROWS = 2000  # a hop to the worker thread costs as much as dozens of rows
_FORMATS = ("jsonl", "csv", "parquet")
_PARQUET = "application/vnd.apache.parquet"
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


@router.get(
    "/runs/{run}/export",
    dependencies=[Depends(require("read"))],
    response_class=StreamingResponse,
    responses={
        200: {
            "content": {
                "application/x-ndjson": {"schema": {"type": "string"}},
                "text/csv": {"schema": {"type": "string"}},
                _PARQUET: {"schema": {"type": "string", "format": "binary"}},
            }
        }
    },
)
def export(
    run: SeenRun,
    services: ServicesDep,
    format: str = "jsonl",  # noqa: A002 - its name in the query
    name: Annotated[list[str] | None, Query(max_length=1000)] = None,
) -> Response:
    """Rows {"name","rank","step","time","value"}, by name, then rank, then step. Formats: jsonl, csv, parquet. name: only these
    series."""
    if format not in _FORMATS:
        raise ApiError(400, "bad_request", f"format is {format[:80]!r}; allowed are {', '.join(_FORMATS)}", "format")
    rows = services.store.samples(run, name)
    if format == "parquet":
        return StreamingResponse(parquet.write(_chunks(rows)), media_type=_PARQUET)
    if format == "csv":
        return StreamingResponse(_csv(rows), media_type="text/csv; charset=utf-8")
    return StreamingResponse(_jsonl(rows), media_type="application/x-ndjson")


def _chunks(rows: Iterable[LogRow]) -> Iterator[list[LogRow]]:
    chunk: list[LogRow] = []
    for row in rows:
        chunk.append(row)
        if len(chunk) == _CHUNK_ROWS:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def _jsonl(rows: Iterable[LogRow]) -> Iterator[bytes]:
    encode = msgspec.json.Encoder().encode_lines
    for chunk in _chunks(rows):
        yield encode([row if math.isfinite(row.value) and math.isfinite(row.time) else plain(row) for row in chunk])


def _csv(rows: Iterable[LogRow]) -> Iterator[bytes]:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(("name", "rank", "step", "time", "value"))
    for chunk in _chunks(rows):
        # repr() of a float reads back as the same float; a spreadsheet would run a name that begins like a formula.
        writer.writerows(
            (
                "'" + row.name if row.name.startswith(_FORMULA) else row.name,
                row.rank,
                row.step,
                repr(row.time),
                plain(row.value),
            )
            for row in chunk
        )
        yield file.getvalue().encode()
        file.seek(0)
        file.truncate()
    if file.tell():
        yield file.getvalue().encode()
