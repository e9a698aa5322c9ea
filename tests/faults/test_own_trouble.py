"""A21 and A23: trouble of the agent's own, and of what the script puts in its way. See also
tests/agent/delivery/test_handoff.py (A21, A22, A23) and tests/agent/samplers (A22)."""

from __future__ import annotations

import errno
import fcntl
import itertools
import logging
import os
import socket
import threading
import time
import zlib
from pathlib import Path
from typing import Any

import pytest
from builders import free_port, until
from case_selection import everyday
from driven_sender import Driven, row, steps_in
from recording_transport import RecordingTransport

import perfagent
from perfagent.boundary import guard
from perfagent.delivery.transport import Reply

pytestmark = pytest.mark.fault

FULL, TOO_MANY = OSError(errno.ENOSPC, "No space left on device"), OSError(errno.EMFILE, "Too many open files")
PLACES = [  # calls of the two threads that reach the kernel or take memory
    (os, "open", TOO_MANY), (os, "write", FULL), (os, "write", MemoryError()), (os, "fdatasync", OSError(errno.EIO, "I/O error")),
    (fcntl, "flock", OSError(errno.ENOLCK, "No locks available")), (zlib, "compress", MemoryError()),
    (Path, "mkdir", PermissionError()), (Path, "unlink", PermissionError()), (socket, "socket", TOO_MANY),
    (socket.socket, "sendall", BrokenPipeError()), (socket.socket, "sendall", SystemExit(3)),
    (socket.socket, "recv_into", ConnectionResetError()),
]  # fmt: skip
THREADS = ("perfagent-sender", "perfagent-courier")


@pytest.mark.real
@pytest.mark.parametrize("at", everyday(1, [1, 4]))
@pytest.mark.parametrize(("place", "name", "error"), PLACES, ids=lambda part: getattr(part, "__name__", str(part)))
def test_a21_error_at_any_call_costs_at_most_one_new_beginning(fault, monkeypatch, caplog, place, name, error, at):
    """A server that is away, comes, takes everything: with one error somewhere on the way, at the first or a later
    call."""
    function, calls = getattr(place, name), itertools.count(1)

    def call(*arguments: Any, **more: Any) -> Any:
        if threading.current_thread().name in THREADS and next(calls) == at:
            raise error
        return function(*arguments, **more)

    monkeypatch.setattr(place, name, call)
    port = free_port()
    caplog.set_level(logging.WARNING, "perfagent")
    sender = fault.sender(f"http://127.0.0.1:{port}", flush_s=0.05, spool_tick_s=0.02, pause_s=lambda _: 0.02)
    for handed in range(1, 41):
        sender.rows.append(row(handed))
        time.sleep(0.003)
        if handed % 5 == 0:  # so that no tick takes more of them
            until(lambda: len(sender.rows) <= 1, why="rows are not taken")
        if handed == 20:
            until(lambda: sender.counters["failed"] or sender.counters["couriers_lost"])
            server = fault.server(port=port)
    sender.flush(10.0)
    assert not sender.disabled
    sender.close("")
    assert next(calls) > at or at > 1 or name in ("fdatasync", "compress"), "the error never came"
    assert sender.counters["errors"] <= 1
    assert len([r for r in caplog.records if "starting over" in r.message]) <= 1
    stored = server.values("loss")
    assert {*stored.values()} == {0.5}
    assert len(stored) >= handed - 15, f"{handed - len(stored)} of {handed} rows are gone"


def test_a21_courier_is_replaced_and_its_loss_told_once(tmp_path, caplog):
    caplog.set_level(logging.WARNING, "perfagent")
    left = [2]

    class Dying(RecordingTransport):
        def post(self, body: bytes, **more: Any) -> Reply:
            if left[0]:
                left[0] -= 1
                raise SystemExit("the thread ends")
            return super().post(body, **more)

    one = Driven(tmp_path, Dying()).goes_on(8, [row(1)])
    assert steps_in(one.transport.frames) == [1], "nobody carries any longer"
    assert (one.counters["couriers_lost"], one.counters["errors"]) == (2, 0)
    (told,) = [record.message for record in caplog.records if "no thread for the network" in record.message]
    assert one.transport.closed, "its connection is left open"
    assert "the thread ends" in told
    one.end()


# ---- A23


class Raising(logging.Handler):
    """Of a script that wants a field in every record, or no warnings at all."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.name == "perfagent":
            self.records.append(record.getMessage())
            raise KeyError("request_id")


def test_a23_handler_of_logs_that_raises_stays_out_of_training(tmp_path: Path) -> None:
    handler, logger = Raising(), logging.getLogger("perfagent")
    logger.addHandler(handler)
    try:
        run = perfagent.init(record=tmp_path)
        run.log(None)  # type: ignore[arg-type]

        @guard.guarded
        def hook() -> None:
            raise ValueError("hook")

        hook()
        run.finish()
        run.log({"late": 1.0})
        guard.reset()
        said = " | ".join(handler.records)
        assert all(words in said for words in ("log() takes a dict", "turned off", "after the end of the run"))
        one = Driven(tmp_path, RecordingTransport())
        for step in range(4):
            one.transport.answers.append(Reply(503, {}, b""))
            one.goes_on(5, [row(step)])
        assert (one.sender.disabled, one.counters["errors"]) == (False, 0)
        assert steps_in(one.transport.stored.values()) == [0, 1, 2, 3]
        one.end()
    finally:
        logger.removeHandler(handler)
