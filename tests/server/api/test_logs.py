"""The server's log: JSON on request, with the request and without keys."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from perfagent_server.logs import configure_logs, current_request, without_keys

KEY = "pfa_ingest_abcd1234_" + "x" * 43


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """What the root logger wrote; the loggers are put back behind the test."""
    root = logging.getLogger()
    before = root.handlers, root.level
    yield io.StringIO()
    root.handlers, root.level = before


def lines(written: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in written.splitlines()]


def test_each_line_is_an_object_with_request_run_and_exception(stream: io.StringIO) -> None:
    configure_logs("json", "info", access=False, stream=stream)
    log = logging.getLogger("perfagent.server")
    token = current_request.set(("abc", "/api/v1/runs/r1/series"))
    try:
        raise ValueError("line one\nline two")
    except ValueError:
        log.exception("it failed for %s", "a reason")
    finally:
        current_request.reset(token)
    log.info("outside of a request", extra={"run": "r2"})
    first, second = lines(stream.getvalue())
    assert [first[name] for name in ("level", "logger", "message", "request_id", "run")] == [
        "ERROR", "perfagent.server", "it failed for a reason", "abc", "r1",
    ]  # fmt: skip
    assert "line two" in first["exception"] and first["time"].startswith("20")
    assert (second["run"], "request_id" in second) == ("r2", False)


@pytest.mark.fault
@pytest.mark.parametrize("form", ["json", "text"])
def test_x08_keys_and_tokens_are_cut_to_their_prefix(stream: io.StringIO, form: Any) -> None:
    configure_logs(form, "info", access=True, stream=stream)
    logging.getLogger("x").error("the key %s and http://h/login?token=secret-of-a-link", KEY)
    logging.getLogger("uvicorn.access").info('%s - "%s %s HTTP/%s" %d', "::1", "GET", f"/login?token={KEY}", "1.1", 200)
    written = stream.getvalue()
    assert "x" * 43 not in written and "secret-of-a-link" not in written
    assert "pfa_ingest_abcd1234_..." in written
    harmless = "pfa_ingest, token of a model, ?page=2&limit=3"
    assert without_keys(harmless) == harmless
