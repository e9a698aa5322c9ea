"""A01 to A05: no server, one that stands still, a slow one, a bad line, a long outage."""

from __future__ import annotations

import logging
import re
import signal
import time
from pathlib import Path

import pytest
from builders import free_port, until
from faults import loops
from faults.accounts import Accounts, ends_in_time, left_in, pauses, row
from faults.proxy import Proxy
from ingest_server import IngestProcess, IngestServer, Scripted
from stepped_clock import SteppedClock

import perfagent

pytestmark = pytest.mark.fault

# ---- A01


def test_a01_without_a_server_the_start_is_quick_and_says_so_once(
    fault: Accounts, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with caplog.at_level(logging.WARNING, "perfagent"):
        took = []
        for _ in range(3):  # the quickest of three: what runs beside this test takes its time, too
            began = time.monotonic()
            sender = fault.sender(url)
            took.append(time.monotonic() - began)
            if took[-1] <= 0.25:
                break
            sender.close("")
        assert min(took) <= 0.25
        for step in range(10):
            sender.rows.append(row(step))
        until(lambda: sender.counters["failed"] >= 2, why="it does not try again")
    why = "ConnectionRefusedError: [Errno 111] Connection refused"
    expected = f"perfagent: server {url} unreachable ({why}), recording to {sender.spool.folder}; will retry"
    assert [record.message for record in caplog.records] == [expected]
    sender.close("finished")
    _, left = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert re.search(
        rf"not all of this run has reached server {url}: \d frames? \(1 KiB\) kept in {sender.spool.folder}\.", left
    )
    assert f"`perfagent sync --server {url}` sends it" in left, "whatever server the next command would find"
    assert left.endswith("so does the next run here that sends to this server, within a week")
    frames = left_in(sender.spool.folder)
    assert [s for f in frames for g in f.groups for s in g.steps()] == list(range(10))
    assert [e.data["state"] for f in frames for e in f.events] == ["finished"]


def test_a01_attach_returns_within_a_quarter_of_a_second_whatever_the_server(fault: Accounts) -> None:
    slow = fault.server(rule=lambda _: Scripted(delay_s=30.0))
    for url in (slow.url, f"http://127.0.0.1:{free_port()}", "http://monitor.invalid:8420"):
        took = []
        for _ in range(3):  # the quickest of three: what runs beside this test takes its time, too
            began = time.monotonic()
            run = perfagent.init(server=url)
            took.append(time.monotonic() - began)
            run.log({"loss": 1.0})
            with ends_in_time(run._sender):
                run.finish()
            if took[-1] <= 0.25:
                break
        assert min(took) <= 0.25, url


def test_a01_a_server_that_comes_later_gets_everything(fault: Accounts) -> None:
    port = free_port()
    sender = fault.sender(f"http://127.0.0.1:{port}")
    for step in range(100):
        sender.rows.append(row(step))
    until(lambda: sender.counters["failed"] >= 1)
    server = fault.server(port=port)
    sender.rows.append(row(100))
    until(lambda: len(server.values("loss")) == 101, within_s=40, why="the backlog never came")
    sender.close("finished", timeout_s=20.0)
    assert sorted(server.values("loss")) == list(range(101))
    assert not sender.spool.folder.exists()


# ---- A02, A03


def test_a02_a_stopped_server_delays_neither_append_nor_exit_and_gets_all_when_it_wakes(tmp_path: Path) -> None:
    port = free_port()
    server = IngestProcess(port)
    books = Accounts(tmp_path)
    try:
        sender = books.sender(f"http://127.0.0.1:{port}")
        for step in range(50):
            sender.rows.append(row(step))
        assert sender.flush(10)
        server.process.send_signal(signal.SIGSTOP)
        late = []
        nothing: list[int] = []
        for first in (50, 150, 250):  # the best of three: the machine may delay what is ours, too
            slowest, control = 0.0, 0.0
            for step in range(first, first + 100):
                given = row(step)
                began = time.perf_counter()
                nothing.append(step)
                between = time.perf_counter()
                sender.rows.append(given)
                slowest = max(slowest, time.perf_counter() - between)
                control = max(control, between - began)
                time.sleep(0.005)
            late.append(slowest - control)  # beside the same loop without us
        assert min(late) <= 0.005
        until(lambda: sender.counters["spooled"] == 700)
        assert sender.spool.on_disk > 0
        server.process.send_signal(signal.SIGCONT)
        until(lambda: sender.spool.waiting == 0, within_s=40)
        assert server.steps() == list(range(350))
        server.process.send_signal(signal.SIGSTOP)
        sender.rows.append(row(350))
        with ends_in_time(sender):
            sender.close("finished")
    finally:
        server.end()


def test_a03_a_slow_server_gets_every_sample_once(fault: Accounts) -> None:
    server = fault.server(
        Scripted(delay_s=1.0, store=True, cut=True), Scripted(body=b"x" * 50, slow_s=0.02, store=True)
    )
    sender = fault.sender(server)
    for step in range(20):
        sender.rows.append(row(step))
    until(lambda: server.script == [] and sender.spool.waiting == 0, within_s=40)
    assert sorted(server.values("loss")) == list(range(20))


@pytest.mark.parametrize(
    "answer", [Scripted(delay_s=30.0), Scripted(body=b"x" * 1000, slow_s=1.0)], ids=["30s", "1Bps"]
)
def test_a03_a_request_is_given_up_after_ten_seconds_in_all(
    fault: Accounts, monkeypatch: pytest.MonkeyPatch, answer: Scripted
) -> None:
    """Each look at the clock takes a second: the socket is polled in slices of at most a quarter of one."""
    from perfagent.delivery import fork_safe_sockets, transport

    clock = SteppedClock(1.0)
    server = fault.server(answer)
    client = transport.HttpTransport(server.url)
    for module in (transport, fork_safe_sockets):
        monkeypatch.setattr(module, "time", clock)
    with pytest.raises(transport.ServerUnreachable):
        client.post(loops.frame_bytes(seq=1))
    assert 10.0 <= clock.now - 1.0 <= 13.0


# ---- A04


@pytest.mark.parametrize("cuts", [60, pytest.param(200, marks=pytest.mark.long)])
def test_a04_cuts_in_every_place_lose_and_double_nothing(fault: Accounts, cuts: int) -> None:
    server = fault.server()
    with Proxy(server.port, seed=4) as proxy:
        steps = loops.log_through(fault, proxy, cuts=cuts)
        assert proxy.cuts >= cuts
        assert all(
            proxy.done[kind] for kind in ("request", "response", "half_request", "half_response", "late", "twice")
        )
    assert sorted(server.values("loss")) == list(range(steps))
    assert len(server.frames) > len(server.stored), "no frame arrived twice: the proxy did not do its work"


# ---- A05


def test_a05_the_thousandth_failure_is_like_the_tenth(fault: Accounts) -> None:
    sender = fault.sender(f"http://127.0.0.1:{free_port()}")
    paused = pauses(sender)
    sender.rows.append(row(1))
    until(lambda: paused)
    dispatcher, before = sender._dispatch(), len(paused)
    dispatcher._failures, dispatcher._retry_at = 5000, 0.0  # two days at 30 s
    until(lambda: dispatcher._failures > 5000 and len(paused) > before)
    assert all(0.99 <= pause <= 30.0 + 1e-6 for pause in paused), paused
    assert sender.counters["errors"] == 0


def test_a05_half_an_hour_without_a_server_in_time_lapse_is_kept_within_bounds_and_delivered(tmp_path: Path) -> None:
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


@pytest.mark.long
@pytest.mark.parametrize("hours", [1.0, pytest.param(2.0, marks=pytest.mark.long)])
def test_a05_a_day_of_random_numbers_in_one_series_fits_as_well(tmp_path: Path, hours: float) -> None:
    """The worst that there is; scripts/faults delivers a whole day of it."""
    outage = loops.outage(tmp_path, hours=hours, port=free_port(), shape="noise")
    outage.abandon()
    assert outage.steps > 350_000 * hours
    assert outage.spool_bytes * 24 / hours <= 64 * 2**20
    assert outage.grown_bytes <= 32 * 2**20
