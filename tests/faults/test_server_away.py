"""A01 to A05: no server, one that stands still, a slow one, a bad line, a long outage. Deadlines of one request (A03) are
in tests/agent/delivery/test_transport.py."""

from __future__ import annotations

import logging
import signal
import socket
import threading
from pathlib import Path

import pytest
from builders import free_port, until
from faults import loops
from faults.accounts import Accounts, ends_in_time, left_in, row
from faults.proxy import Proxy
from ingest_server import IngestProcess, IngestServer, Scripted

import perfagent

pytestmark = [pytest.mark.fault, pytest.mark.real]


def test_a01_without_a_server_all_is_kept_and_told_once(fault: Accounts, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "perfagent")
    url = f"http://127.0.0.1:{free_port()}"
    sender = fault.sender(url, pause_s=lambda _: 0.05)
    sender.rows.extend(row(step) for step in range(10))
    until(lambda: sender.counters["failed"] >= 2, why="it does not try again")
    (told,) = [record.message for record in caplog.records]
    for word in (url, "unreachable", "ConnectionRefusedError", str(sender.spool.folder)):
        assert word in told
    sender.close("finished")
    _, left = [record.message for record in caplog.records]
    for word in ("not all of this run", str(sender.spool.folder), f"perfagent sync --server {url}", "within a week"):
        assert word in left
    frames = left_in(sender.spool.folder)
    assert [s for f in frames for g in f.groups for s in g.steps()] == list(range(10))
    assert [e.data["state"] for f in frames for e in f.events] == ["finished"]


def test_a01_no_server_keeps_the_training_waiting(fault: Accounts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it is slow, refuses, or has no address: the training's own thread connects to none."""
    connect, callers = socket.socket.connect, set()

    def connected(self: socket.socket, address: tuple[str, int]) -> None:
        callers.add(threading.current_thread().name)
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", connected)
    slow = fault.server(rule=lambda _: Scripted(delay_s=30.0))
    for url in (slow.url, f"http://127.0.0.1:{free_port()}", "http://monitor.invalid:8420"):
        run = perfagent.init(server=url)
        run.log({"loss": 1.0})
        with ends_in_time(run._sender):
            run.finish()
    assert callers == {"perfagent-courier"}
    assert run.verdict() is None


def test_a02_stopped_server_gets_all_when_it_wakes(tmp_path: Path) -> None:
    """What it costs the training is measured by scripts/faults; that a process ends in time is in test_ends.py."""
    port = free_port()
    server = IngestProcess(port)
    try:
        sender = Accounts(tmp_path).sender(f"http://127.0.0.1:{port}")
        sender.rows.extend(row(step) for step in range(50))
        assert sender.flush(10)
        server.process.send_signal(signal.SIGSTOP)
        sender.rows.extend(row(step) for step in range(50, 350))
        until(lambda: sender.counters["spooled"] == 700)
        assert sender.spool.on_disk > 0
        server.process.send_signal(signal.SIGCONT)
        until(lambda: sender.spool.waiting == 0, within_s=40)
        assert server.steps() == list(range(350))
        sender.close("finished", timeout_s=20.0)
    finally:
        server.end()


def test_a03_slow_server_gets_every_sample_once(fault: Accounts) -> None:
    answers = Scripted(delay_s=0.5, store=True, cut=True), Scripted(body=b"x" * 50, slow_s=0.005, store=True)
    server = fault.server(*answers)
    sender = fault.sender(server, pause_s=lambda _: 0.05)
    sender.rows.extend(row(step) for step in range(20))
    until(lambda: server.script == [] and sender.spool.waiting == 0, within_s=40)
    assert sorted(server.values("loss")) == list(range(20))


@pytest.mark.parametrize("cuts", [60, pytest.param(200, marks=pytest.mark.long)])
def test_a04_cuts_in_every_place_lose_and_double_nothing(fault: Accounts, cuts: int) -> None:
    server = fault.server()
    with Proxy(server.port, seed=4) as proxy:
        steps = loops.log_through(fault, proxy, cuts=cuts)
        assert proxy.cuts >= cuts
        kinds = ("request", "response", "half_request", "half_response", "late", "twice")
        assert all(proxy.done[kind] for kind in kinds)
    assert sorted(server.values("loss")) == list(range(steps))
    assert len(server.frames) > len(server.stored), "no frame arrived twice: the proxy did not do its work"


def test_a05_half_an_hour_without_a_server_is_kept_within_bounds(tmp_path: Path) -> None:
    """In time lapse."""
    port = free_port()
    outage = loops.outage(tmp_path, hours=0.5, port=port)
    assert outage.attempts > 30
    with IngestServer(port=port) as server:
        outage.deliver()
        counted = {name: len(server.samples(name)) for name in outage.names}
    assert counted == dict.fromkeys(outage.names, 18_000)
    assert outage.lost == 0
    assert outage.spool_bytes * 48 <= 64 * 2**20
    assert outage.grown_bytes <= 32 * 2**20
