"""A21 to A23: trouble of the agent's own, of a driver, of callbacks. See also tests/agent/delivery/test_handoff.py
(A21) and tests/agent/samplers (A22)."""

from __future__ import annotations

import errno
import logging
import os
import socket
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from builders import free_port, until
from case_selection import everyday
from faults.accounts import Accounts, row
from ingest_server import Scripted

import perfagent
from perfagent.boundary import guard
from perfagent.delivery import courier, segments, spool
from perfagent.delivery.backlog import Backlog
from perfagent.delivery.columns import Columns
from perfagent.delivery.courier import Courier
from perfagent.delivery.segments import Segments
from perfagent.delivery.send_loop import Dispatcher
from perfagent.delivery.spool import Spool
from perfagent.delivery.transport import HttpTransport

pytestmark = pytest.mark.fault

FULL, TOO_MANY = OSError(errno.ENOSPC, "No space left on device"), OSError(errno.EMFILE, "Too many open files")
PLACES: list[tuple[Any, str, list[BaseException]]] = [
    # every call of the two threads that reaches the kernel or takes memory, and the parts between them
    (os, "open", [FULL, TOO_MANY, MemoryError()]),
    (os, "write", [FULL, OSError(errno.EIO, "I/O error"), MemoryError()]),
    (os, "pwrite", [FULL]),
    (os, "fdatasync", [OSError(errno.EIO, "I/O error")]),
    (os, "ftruncate", [FULL]),
    (os, "close", [OSError(errno.EIO, "I/O error")]),
    (segments.fcntl, "flock", [OSError(errno.ENOLCK, "No locks available")]),
    (zlib, "compress", [MemoryError()]),
    (Path, "mkdir", [PermissionError()]),
    (Path, "unlink", [PermissionError()]),
    (Path, "stat", [PermissionError()]),
    (Path, "iterdir", [PermissionError()]),
    (socket, "socket", [TOO_MANY]),
    (socket.socket, "connect", [OSError(errno.ENETUNREACH, "Network is unreachable"), TimeoutError()]),
    (socket.socket, "sendall", [BrokenPipeError(), ConnectionResetError()]),
    (socket.socket, "recv_into", [ConnectionResetError()]),
    (courier, "judge", [MemoryError()]),
    (HttpTransport, "post", [RuntimeError("fault"), MemoryError(), SystemExit(3)]),
    (HttpTransport, "close", [RuntimeError("fault")]),
    (Courier, "carry", [RuntimeError("fault")]),
    (Courier, "_sample", [MemoryError(), SystemExit(3)]),
    (Columns, "groups", [MemoryError()]),
    (Segments, "append", [MemoryError()]),
    (Segments, "write_state", [MemoryError()]),
    (Segments, "rotate", [RuntimeError("fault")]),
    (Backlog, "hold", [MemoryError()]),
    (Backlog, "load", [MemoryError()]),
    (Spool, "next", [MemoryError(), SystemExit(3)]),
    (Spool, "ack", [RuntimeError("fault")]),
    (Spool, "hold", [RuntimeError("fault")]),
    (spool, "merge", [MemoryError()]),
    (Dispatcher, "_drain", [MemoryError()]),
    (Dispatcher, "_send", [RuntimeError("fault")]),
    (Dispatcher, "_settle", [RuntimeError("fault")]),
]
THREADS = ("perfagent-sender", "perfagent-courier")


class Injected:
    """Raises once, at the n-th call on one of the agent's threads; calls of other threads pass."""

    def __init__(self, function: Callable[..., Any], error: BaseException, at: int) -> None:
        self.function, self.error, self.left = function, error, at
        self.done = False

    def method(self) -> Callable[..., Any]:
        def call(*arguments: Any, **more: Any) -> Any:
            if not self.done and threading.current_thread().name in THREADS:
                self.left -= 1
                if self.left <= 0:
                    self.done = True
                    raise self.error
            return self.function(*arguments, **more)

        return call


@pytest.mark.parametrize("at", everyday(1, [1, 4]))
@pytest.mark.parametrize(
    ("place", "name", "error"),
    [
        pytest.param(place, name, error, id=f"{getattr(place, '__name__', place)}.{name}-{type(error).__name__}")
        for place, name, errors in PLACES
        for error in errors
    ],
)
def test_a21_an_error_at_any_call_of_the_threads_costs_at_most_one_new_beginning(
    fault: Accounts,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    place: Any,
    name: str,
    error: BaseException,
    at: int,
) -> None:
    """A server that is away, comes, takes everything: with one error somewhere on the way, at the first or a later
    call."""
    monkeypatch.setattr("perfagent.delivery.handoff.AGAIN_S", 0.05)
    monkeypatch.setattr(spool, "KEEP_S", 0.02)  # frames of the backlog are made, too
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 4000)
    injected = Injected(getattr(place, name), error, at=at)
    monkeypatch.setattr(place, name, injected.method())
    port = free_port()
    with caplog.at_level(logging.WARNING, "perfagent"):
        sender = fault.sender(f"http://127.0.0.1:{port}", flush_s=0.05, spool_tick_s=0.02)
        dispatcher = sender._dispatch()
        dispatcher._random.uniform = lambda a, b: 0.02  # type: ignore[method-assign]
        sender.add_slow_source(lambda: None)
        for handed in range(1, 61):
            sender.rows.append(row(handed))
            time.sleep(0.003)
            if handed % 5 == 0:  # so that no tick takes more of them
                until(lambda: len(sender.rows) <= 1, why="rows are not taken")
            if handed == 30:
                server = fault.server(port=port)
        sender.flush(10.0)
        working = not sender.disabled
        sender.close("")
    assert injected.done or at > 1, "the error never came"
    assert sender.counters["errors"] <= 1
    assert working
    assert len([r for r in caplog.records if "starting over" in r.message]) <= 1
    stored = server.values("loss")
    assert all(value == 0.5 for value in stored.values())
    assert len(stored) >= handed - 20, f"{handed - len(stored)} of {handed} rows are gone"


def test_a21_a_courier_that_dies_is_replaced_and_told_once(
    fault: Accounts, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = fault.server()
    original, calls = HttpTransport.post, []

    def post(self: HttpTransport, *arguments: Any, **more: Any) -> Any:
        calls.append(1)
        if len(calls) <= 2:
            raise SystemExit("the thread ends")
        return original(self, *arguments, **more)

    monkeypatch.setattr(HttpTransport, "post", post)
    with caplog.at_level(logging.WARNING, "perfagent"):
        sender = fault.sender(server)
        sender._dispatch()._random.uniform = lambda a, b: 0.05  # type: ignore[method-assign]
        sender.rows.append(row(1))
        until(lambda: sorted(server.values("loss")) == [1], why="nobody carries any longer")
    assert sender.counters["couriers_lost"] == 2
    assert len([r for r in caplog.records if "no thread for the network" in r.message]) == 1


def test_a21_no_thread_for_the_network_is_told_once_and_asked_for_again(
    fault: Accounts, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = fault.server()
    start, refused = threading.Thread.start, []

    def limited(thread: threading.Thread) -> None:
        if thread.name == "perfagent-courier" and len(refused) < 3:
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    with caplog.at_level(logging.WARNING, "perfagent"):
        sender = fault.sender(server)
        sender._dispatch()._random.uniform = lambda a, b: 0.05  # type: ignore[method-assign]
        sender.rows.append(row(1))
        until(lambda: sorted(server.values("loss")) == [1], why="a thread is not asked for again")
    assert sender.counters["errors"] == 0
    (told,) = [record.message for record in caplog.records]
    assert "no thread for the network (can't start new thread)" in told


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


def test_a21_no_new_thread_at_the_interpreters_end_is_no_trouble_and_nothing_is_lost(
    fault: Accounts, tmp_path: Path
) -> None:
    import subprocess

    from builders import job_environment
    from faults.accounts import left_in

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


def test_a23_what_the_scripts_own_handler_of_logs_raises_stays_out_of_its_training(
    raising: Raising, tmp_path: Path
) -> None:
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
    for words in ("log() takes a dict", "the level info", "turned off", "after the end of the run"):
        assert words in said


def test_a23_a_handler_of_logs_that_raises_does_not_switch_the_agent_off_when_the_server_comes_back(
    fault: Accounts, raising: Raising, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perfagent.delivery.handoff.AGAIN_S", 0.05)
    server = fault.server()
    sender = fault.sender(server)
    sender._dispatch()._random.uniform = lambda a, b: 0.02  # type: ignore[method-assign]
    for step in range(4):
        server.script.append(Scripted(status=503))
        sender.rows.append(row(step))
        assert sender.flush(10)
    assert sum("reachable again" in told for told in raising.records) == 4
    assert (sender.disabled, sender.counters["errors"]) == (False, 0)
    assert sorted(server.values("loss")) == [0, 1, 2, 3]


def test_a23_a_callback_that_raises_is_off_after_three_errors_with_one_warning(
    fault: Accounts, caplog: pytest.LogCaptureFixture
) -> None:
    server = fault.server()
    calls: list[Any] = []
    good: list[Any] = []

    def bad(command: Any) -> None:
        calls.append(command)
        raise ValueError("callback")

    with caplog.at_level(logging.WARNING, "perfagent"):
        sender = fault.sender(server)
        sender.on_command += [bad, good.append]
        for number in range(5):
            server.commands.append({"kind": "test", "number": number})
            sender.rows.append(row(number))
            assert sender.flush(10)
    assert len(calls) == 3
    assert len(good) == 5
    assert len([r for r in caplog.records if "command" in r.message]) == 1


def test_a23_a_source_that_raises_now_and_then_stays_and_one_that_always_does_goes(
    fault: Accounts, caplog: pytest.LogCaptureFixture
) -> None:
    sometimes: list[int] = []
    always: list[int] = []

    def moody() -> None:
        sometimes.append(1)
        if len(sometimes) % 3:
            raise ValueError("now and then")

    def broken() -> None:
        always.append(1)
        raise SystemExit("always")

    with caplog.at_level(logging.WARNING, "perfagent"):
        sender = fault.sender(fault.server(), spool_tick_s=0.02, start=False)
        sender.add_source(moody)
        sender.add_source(broken)
        sender.start()
        until(lambda: len(sometimes) > 12)
    assert len(always) == 3
    assert len([r for r in caplog.records if "failed three times" in r.message]) == 1
