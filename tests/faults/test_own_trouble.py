"""A21 and A23: trouble of the agent's own, and of what the script puts in its way. See also
tests/agent/delivery/test_handoff.py (A21, A22, A23) and tests/agent/samplers (A22)."""

from __future__ import annotations

import errno
import fcntl
import itertools
import logging
import os
import socket
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from builders import free_port, job_environment, until
from case_selection import everyday
from driven_sender import Driven, row, steps_in
from faults.accounts import left_in

import perfagent
from perfagent.boundary import guard
from perfagent.delivery.transport import RecordingTransport, Reply

pytestmark = pytest.mark.fault

FULL, TOO_MANY = OSError(errno.ENOSPC, "No space left on device"), OSError(errno.EMFILE, "Too many open files")
PLACES: list[tuple[Any, str, list[BaseException]]] = [
    # calls of the two threads that reach the kernel or take memory
    (os, "open", [TOO_MANY]),
    (os, "write", [FULL, MemoryError()]),
    (os, "fdatasync", [OSError(errno.EIO, "I/O error")]),
    (fcntl, "flock", [OSError(errno.ENOLCK, "No locks available")]),
    (zlib, "compress", [MemoryError()]),
    (Path, "mkdir", [PermissionError()]),
    (Path, "unlink", [PermissionError()]),
    (socket, "socket", [TOO_MANY]),
    (socket.socket, "sendall", [BrokenPipeError(), SystemExit(3)]),
    (socket.socket, "recv_into", [ConnectionResetError()]),
]
THREADS = ("perfagent-sender", "perfagent-courier")


@pytest.mark.real
@pytest.mark.parametrize("at", everyday(1, [1, 4]))
@pytest.mark.parametrize(
    ("place", "name", "error"),
    [
        pytest.param(place, name, error, id=f"{name}-{type(error).__name__}")
        for place, name, errors in PLACES
        for error in errors
    ],
)
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


AT_EXIT = """
import atexit, sys, threading, time
import perfagent
run = perfagent.init(run_id="late")
run._sender.settled.wait(20)
for step in range(100):
    run.log({"loss": 1.0}, step=step)
start = threading.Thread.start
def refuse(self):
    raise RuntimeError("can't start new thread at interpreter shutdown")
threading.Thread.start = refuse
print("ready", flush=True)
"""


@pytest.mark.real
def test_a21_no_new_thread_at_the_interpreters_end_loses_nothing(tmp_path: Path) -> None:
    variables = job_environment(tmp_path, PERFAGENT_SERVER=f"http://127.0.0.1:{free_port()}")
    done = subprocess.run([sys.executable, "-c", AT_EXIT], env=variables, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "ready\n")
    assert "Traceback" not in done.stderr
    (folder,) = (tmp_path / "state" / "perfagent" / "spool").iterdir()
    kept = [step for frame in left_in(folder) for g in frame.groups if "loss" in g.values for step in g.steps()]
    assert sorted(kept) == list(range(100))


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


@pytest.fixture
def raising() -> Iterator[Raising]:
    handler = Raising()
    logger = logging.getLogger("perfagent")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)


def test_a23_handler_of_logs_that_raises_stays_out_of_training(raising: Raising, tmp_path: Path) -> None:
    run = perfagent.init(record=tmp_path)
    run.log(None)  # type: ignore[arg-type]
    run.alert("x", level="loud")

    @guard.guarded
    def hook() -> None:
        raise ValueError("hook")

    hook()
    run.finish()
    run.log({"late": 1.0})
    guard.reset()
    said = " | ".join(raising.records)
    for words in ("log() takes a dict", "level info", "turned off", "after the end of the run"):
        assert words in said


def test_a23_handler_of_logs_that_raises_switches_nothing_off(raising: Raising, tmp_path: Path) -> None:
    one = Driven(tmp_path, RecordingTransport())
    for step in range(4):
        one.transport.answers.append(Reply(503, {}, b""))
        one.goes_on(5, [row(step)])
    assert sum("reachable again" in told for told in raising.records) == 4
    assert (one.sender.disabled, one.counters["errors"]) == (False, 0)
    assert steps_in(one.transport.stored.values()) == [0, 1, 2, 3]
    one.end()
