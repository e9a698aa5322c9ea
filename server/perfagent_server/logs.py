"""What the server's log looks like: lines for people, or one JSON object a line. No line holds a key, only its prefix."""

from __future__ import annotations

import logging
import re
import sys
from contextvars import ContextVar
from typing import Any, TextIO

from pythonjsonlogger.json import JsonFormatter

from perfagent_server.settings import LogFormat

__all__ = ["configure_logs", "current_request", "without_keys"]

current_request: ContextVar[tuple[str, str]] = ContextVar("perfagent_request", default=("", ""))
"""Id and path of the request that is served."""

_KEY = re.compile(r"(pfa_[a-z]+_[0-9A-Za-z]{1,16}_)[0-9A-Za-z]{8,}")
_TOKEN = re.compile(r"([?&](?:token|key|api_key)=)[^&\s\"']+")
_RUN = re.compile(r"/api/v1/runs/([^/?]+)")


def configure_logs(form: LogFormat, level: str, *, access: bool, stream: TextIO | None = None) -> None:
    """Sets up the root logger of a program: everything goes to `stream`, stderr by default. access: a line for each request,
    by uvicorn's access logger, whose level is info."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_Json() if form == "json" else _Text("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
    accesses = logging.getLogger("uvicorn.access")
    accesses.setLevel(logging.INFO if access else logging.CRITICAL)
    for name in ("uvicorn", "uvicorn.access", "uvicorn.error"):
        logging.getLogger(name).handlers.clear()
        logging.getLogger(name).propagate = True


def without_keys(text: str) -> str:
    """The text with each key cut down to its prefix, and without tokens in addresses."""
    return _TOKEN.sub(r"\1...", _KEY.sub(r"\1...", text))


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return without_keys(super().format(record))


class _Json(JsonFormatter):
    """time (RFC 3339), level, logger, message; request_id and run where there is one; exception with its traceback; and the
    fields of an access line."""

    def __init__(self) -> None:
        super().__init__(
            "%(message)s%(levelname)s%(name)s",
            rename_fields={"levelname": "level", "name": "logger", "exc_info": "exception"},
            timestamp="time",
            json_ensure_ascii=False,
        )

    def add_fields(self, log_data: dict[str, Any], record: logging.LogRecord, message_dict: dict[str, Any]) -> None:
        super().add_fields(log_data, record, message_dict)
        log_data.pop("taskName", None)
        log_data.pop("color_message", None)  # uvicorn's, for terminals
        request, path = current_request.get()
        if request:
            log_data.setdefault("request_id", request)
        if (found := _RUN.match(path)) is not None:
            log_data.setdefault("run", found[1])
        if record.name == "uvicorn.access" and isinstance(record.args, tuple) and len(record.args) == 5:
            client, method, target, _version, status = record.args
            log_data |= {"client": client, "method": method, "path": str(target).partition("?")[0], "status": status}

    def format(self, record: logging.LogRecord) -> str:
        return without_keys(super().format(record))
