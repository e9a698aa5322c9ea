"""The error responses of the API: {"error": {"code", "message", "field"?}}, for every status and every way to fail."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, get_args

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import ConfigDict
from starlette.exceptions import HTTPException
from starlette.responses import Response

from perfagent.errors import WireError
from perfagent_server.database import StorageError, StorageFull
from perfagent_server.ingest.decode import TooLarge, UnknownEncoding
from perfagent_server.refusal import RefusalError, Why
from perfagent_server.routes.reply import reply

__all__ = ["CLOSED", "ApiError", "answer", "install", "not_json", "of_refusal", "problem"]

log = logging.getLogger("perfagent.server")


CLOSED = ConfigDict(extra="forbid")
"""`__pydantic_config__` of a body: a field that it does not have is refused by name, for a misspelt one must not be
dropped in silence."""


class ApiError(Exception):
    """Ends a request with this status. code: one word for programs; message: what was given, what is allowed, what to
    do."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        field: str | None = None,
        *,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.field, self.headers = status, code, message, field, headers

    def response(self) -> Response:
        return problem(self.status, self.code, self.message, self.field, headers=self.headers)


_STATUS: dict[Why, int] = {
    "bad_request": 400, "unauthorized": 401, "forbidden": 403, "key_reused": 422, "too_many_failures": 429,
    "too_many_requests": 429, "provider_unreachable": 503,
}  # fmt: skip


def of_refusal(refusal: RefusalError) -> ApiError:
    """The error of what a part below the routes refused."""
    headers = {"WWW-Authenticate": "Bearer"} if refusal.why == "unauthorized" else {}
    if refusal.retry_after_s is not None:
        is_of_many = refusal.why == "too_many_requests"
        headers["Retry-After"] = str(_spread(refusal.retry_after_s) if is_of_many else refusal.retry_after_s)
    return ApiError(_STATUS[refusal.why], refusal.why, refusal.message, refusal.field, headers=headers or None)


def problem(
    status: int, code: str, message: str, field: str | None = None, *, headers: Mapping[str, str] | None = None
) -> Response:
    """The response of an error."""
    error = {"code": code, "message": message}
    if field is not None:
        error["field"] = field
    return reply({"error": error}, status, headers=headers)


def not_json(content_type: str | None) -> ApiError:
    """The refusal of a body that is not sent as JSON."""
    is_what = f"is {content_type.partition(';')[0].strip().lower()[:80]!r}" if content_type else "is missing"
    message = f"Content-Type {is_what}; application/json is needed (curl: -H 'Content-Type: application/json')"
    return ApiError(415, _CODES[415], message, "content-type")


_CODES = {
    400: "bad_request",
    401: "unauthorized",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    408: "timeout",
    413: "too_large",
    415: "unsupported_media_type",
    422: "invalid",
    429: "too_many_requests",
}


async def _api_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _refused(_request: Request, error: Exception) -> Response:
    assert isinstance(error, RefusalError)
    return of_refusal(error).response()


async def _wire_error(_request: Request, error: Exception) -> Response:
    status = 413 if isinstance(error, TooLarge) else 415 if isinstance(error, UnknownEncoding) else 400
    return problem(status, _CODES[status], str(error))


async def _not_unicode(_request: Request, error: Exception) -> Response:
    # JSON can escape half a surrogate pair, and str holds it; no UTF-8, so neither the database nor an answer, can.
    return problem(400, "bad_request", f"a text in the request is not valid Unicode: {error}")


async def _storage_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, StorageError)
    full = isinstance(error, StorageFull)
    headers = {"Retry-After": str(_spread(error.retry_after_s))}
    return problem(507 if full else 503, "disk_full" if full else "busy", str(error), headers=headers)


def _spread(seconds: float) -> int:
    """When to come back, spread over a whole extra interval: a thousand agents with the same second would come back as
    one."""
    return math.ceil(seconds * (1 + random.random()))  # noqa: S311 - nothing is kept secret by it


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = _CODES.get(error.status_code, "error" if error.status_code < 500 else "internal")
    message = str(error.detail)
    if error.status_code == 404 and message == "Not Found":
        message = f"there is nothing at {request.url.path[:200]}; /docs lists what there is"
    return problem(error.status_code, code, message, headers=error.headers)


async def _validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return _invalid(request, error.errors()).response()


async def _internal(request: Request, error: Exception) -> Response:
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return problem(500, "internal", "the server failed on this request; its log has the cause")


_HANDLERS: dict[type[Exception], Callable[[Request, Exception], Awaitable[Response]]] = {
    ApiError: _api_error,
    RefusalError: _refused,
    WireError: _wire_error,
    UnicodeEncodeError: _not_unicode,
    StorageError: _storage_error,
    HTTPException: _http_error,
    RequestValidationError: _validation_error,
}
"""By the error. Any other is a fault of ours."""


def install(app: FastAPI) -> None:
    """Makes every error of the app speak our shape."""
    for kind, handler in _HANDLERS.items():
        app.add_exception_handler(kind, handler)
    app.add_exception_handler(Exception, _internal)


async def answer(request: Request, error: Exception) -> Response | None:
    """The response of an error that was raised before the app; None for a fault of ours, which the app's outermost layer
    answers."""
    handler = next((_HANDLERS[kind] for kind in type(error).__mro__ if kind in _HANDLERS), None)
    return None if handler is None else await handler(request, error)


_UNKNOWN_FIELD = "unexpected_keyword_argument"  # pydantic's name for a field that a dataclass does not have


def _invalid(request: Request, errors: Sequence[Any]) -> ApiError:
    """What is wrong with a request, in our words: FastAPI's own answer repeats the input, which may hold NaN or a lone
    surrogate and then fails to encode (a 500), and names classes that are nobody's business."""
    # A misspelt name first: that the right one is missing follows from it.
    first = min(errors, key=lambda one: one["type"] != _UNKNOWN_FIELD, default=None)
    if first is None:
        return ApiError(422, "invalid", "the request is not valid")
    if first["type"] == "json_invalid":
        return ApiError(400, "bad_request", f"the body is not valid JSON: {first['ctx']['error']}")
    place = [str(part) for part in first["loc"]]
    if place == ["body"]:
        content_type = request.headers.get("content-type")
        if first["type"] != "missing" and not _is_json(content_type):
            return not_json(content_type)
        return ApiError(422, "invalid", "the body must be a JSON object", "body")
    name = ".".join(place[1:] or place)
    if first["type"] == _UNKNOWN_FIELD:
        message = f"the body has no field {place[-1][:80]!r}; allowed are {', '.join(_fields_of_body(request))}"
        return ApiError(422, "invalid", message, name[:80])
    return ApiError(422, "invalid", f"{name}: {first['msg']}", name)


def _is_json(content_type: str | None) -> bool:
    """Whether FastAPI reads it as JSON."""
    media_type = (content_type or "").partition(";")[0].strip().lower()
    return media_type == "application/json" or (media_type.startswith("application/") and media_type.endswith("+json"))


def _fields_of_body(request: Request) -> list[str]:
    declared = request.scope["route"].body_field.field_info.annotation
    shapes = [shape for shape in (declared, *get_args(declared)) if is_dataclass(shape)]
    return [field.name for shape in shapes for field in fields(shape)]
