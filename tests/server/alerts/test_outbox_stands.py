"""Whatever is raised in the outbox, its thread goes on; where it stands, the server says that it is not well."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from api_builders import settings_for
from builders import until
from clocks import Clock
from engine_bench import NOW, Bench
from fastapi.testclient import TestClient
from posting import Posts

from perfagent_server.alerts import channels
from perfagent_server.alerts.outbox import Outbox
from perfagent_server.app import create_app
from perfagent_server.security.outbound import Guard, Reply
from perfagent_server.services import open_services
from perfagent_server.store.tables import delivery

HOOK = "https://example.org/hook"


@pytest.fixture
def bench(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Iterator[Bench]:
    caplog.set_level(logging.CRITICAL, "perfagent.server")
    made = Bench(tmp_path)
    yield made
    made.database.close()


def tell(bench: Bench, *runs: str) -> None:
    engine = bench.engine(clock=Clock(NOW))
    for run in runs:
        bench.send({"loss": [2.0, math.nan]}, [1, 2], name=run)
    engine.run_once()


@pytest.mark.fault
@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt(), GeneratorExit(), MemoryError(), OSError("full")])
def test_s3_a_chore_that_raises_anything_ends_no_outbox(bench: Bench, error: BaseException) -> None:
    def chore(_now: float) -> None:
        raise error

    tell(bench, "r")
    posts = Posts()
    outbox = Outbox(bench.database, clock=Clock(NOW + 20), send=posts)
    outbox.chores.append(chore)
    outbox.start()
    try:
        until(lambda: posts.arrived, why="the alert is sent")
        assert outbox.is_well
        assert outbox.counters["failures"] == 1
    finally:
        outbox.stop()


def test_an_outbox_that_stands_makes_the_server_not_well(tmp_path: Path) -> None:
    services = open_services(settings_for(tmp_path))
    entered, may_go_on, mono = threading.Event(), threading.Event(), Clock(1000.0)
    outbox = Outbox(services.database, monotonic=mono)
    outbox.chores.append(lambda _now: entered.set() or may_go_on.wait(60))
    services.outbox = outbox
    services.watchdog.outbox_trouble = lambda: outbox.trouble
    app = create_app(services.settings, dashboard=False, services=services)
    try:
        with TestClient(app, base_url="http://127.0.0.1:8420") as client:
            assert entered.wait(30)
            assert client.get("/readyz").status_code == 200
            mono.at += 61
            ready = client.get("/readyz")
            assert (ready.status_code, client.get("/livez").status_code) == (503, 503)
            assert "no message to a channel" in ready.json()["error"]["message"]
            may_go_on.set()
            until(lambda: client.get("/readyz").status_code == 200, why="it looks again")
            assert client.get("/livez").status_code == 200
    finally:
        may_go_on.set()


def test_an_outbox_whose_looks_all_fail_is_trouble(bench: Bench) -> None:
    mono = Clock(1000.0)

    def is_mine() -> bool:
        mono.at += 21
        raise LookupError("whose?")

    outbox = Outbox(bench.database, monotonic=mono, is_mine=is_mine)
    outbox.start()
    until(lambda: outbox.wake() or "LookupError: whose?" in outbox.trouble, why="it is said")
    assert outbox.is_well, "a restart does not help"
    outbox.stop()


@pytest.mark.fault
@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt(), GeneratorExit(), TypeError("of \udce4\0")])
def test_s4_a_sender_that_raises_anything_has_failed_once(bench: Bench, error: BaseException) -> None:
    def raises(_count: int) -> int:
        raise error

    tell(bench, "r")
    posts = Posts(raises)
    outbox = Outbox(bench.database, clock=Clock(NOW + 20), send=posts)
    assert [outbox.send_due() for _ in range(2)] == [1, 0], "the next try is not due yet"
    assert len(posts.urls) == 1
    assert (outbox.counters["failed_tries"], outbox.counters["failures"]) == (1, 1)
    [row] = bench.rows(delivery)
    assert (row["state"], row["tries"]) == ("waiting", 1)
    said = "of ?" if isinstance(error, TypeError) else f"{error}"
    assert row["error"] == f"the server failed on this delivery: {type(error).__name__}: {said}"


@pytest.mark.fault
def test_s5_receivers_that_hang_delay_no_other(bench: Bench) -> None:
    may_go_on, got = threading.Event(), list[str]()

    def send(guard: Guard, url: str, body: bytes, headers: dict[str, str]) -> Reply:
        if url != HOOK:
            may_go_on.wait(60)
        got.append(url)
        return Reply(200, {})

    for number in range(12):
        new = channels.NewChannel(name=f"h{number}", url=f"https://example.org/h{number}")
        bench.database.write(lambda connection, new=new: channels.create(connection, new, NOW))
    tell(bench, *"abcdef")
    outbox = Outbox(bench.database, clock=Clock(NOW + 20), send=send)
    outbox.start()
    try:
        until(lambda: got.count(HOOK) == 6, why="the one that answers has all of them")
    finally:
        may_go_on.set()
        outbox.stop()
