"""The server says itself that its rules have stopped, to /readyz and to every channel, and that they judge again."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest
import uvicorn
from api_builders import frame, settings_for
from builders import Receiver, until
from clocks import Clock
from engine_bench import NOW, Bench, OddRule
from sqlalchemy import update

from perfagent.wire import Event, Finding, encode
from perfagent_dashboard.pages import overview
from perfagent_server.alerts import channels
from perfagent_server.app import create_app
from perfagent_server.database import StorageError
from perfagent_server.engine.scheduler import Engine, default_plan
from perfagent_server.engine.set_aside import RULES_STOPPED
from perfagent_server.engine.watchdog import Watchdog
from perfagent_server.rules.catalogue import all_rules
from perfagent_server.rules.plan import Plan
from perfagent_server.rules.window import Window
from perfagent_server.services import open_services
from perfagent_server.store.tables import alert, delivery, rule_state, run

ENTERED, MAY_GO_ON = threading.Event(), threading.Event()


@pytest.fixture(autouse=True)
def gate() -> Iterator[None]:
    ENTERED.clear()
    MAY_GO_ON.clear()
    yield
    MAY_GO_ON.set()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.database.close()


class Blocking(OddRule):
    """A rule that stands still."""

    def judge(self, window: Window) -> Finding | None:
        if window.run != "canary":
            ENTERED.set()
            MAY_GO_ON.wait(60)
        return None


def blocking(_project: str, _off: Sequence[str]) -> Plan:
    return Plan((*all_rules(), Blocking()))


class Watched:
    """An engine whose thread runs, by a clock that is turned by hand, and its watchdog."""

    def __init__(self, bench: Bench, store: Any = None, **options: Any) -> None:
        self.bench, self.mono = bench, Clock(1000.0)
        self.engine = Engine(bench.database, store or bench.store, clock=Clock(NOW), monotonic=self.mono, **options)
        self.dog = Watchdog(
            bench.database, bench.store, self.engine, server="http://here", link="http://here/", on_deliveries=lambda: None,
            clock=Clock(NOW), monotonic=self.mono,
        )  # fmt: skip
        self.engine.start()

    def waits_for_trouble(self, error: str) -> None:
        """Until the test run has failed three times with this error."""

        def fails() -> bool:
            self.mono.at += 1
            self.engine.wake()
            return error in self.dog.trouble

        until(fails, why="the test run failed three times")

    def pass_time(self, seconds: float) -> None:
        self.mono.at += seconds
        self.dog.look()
        self.dog.look()

    def recover(self) -> None:
        """A minute in which frames come and are judged."""
        for step in range(8):
            self.mono.at += 10
            self.bench.send({"loss": [1.0]}, [step], name="beat")
            newest = self.bench.store.newest_id()
            self.engine.wake()
            until(lambda newest=newest: self.engine.judged()[0] >= newest, why="the rules judge")  # type: ignore[misc]
            self.dog.look()

    def told(self) -> list[tuple[str, str]]:
        """Event and id of what is to be sent of the rules. (Runs that are silent meanwhile are lost, which is told, too.)"""
        bodies = [(row["event"], json.loads(row["body"])["data"]["alert"]) for row in self.bench.rows(delivery)]
        return [(event, alert["id"]) for event, alert in bodies if alert["rule"] == RULES_STOPPED]


@pytest.mark.sql
def test_a_rule_that_blocks_is_told_once_and_so_is_its_end(bench: Bench) -> None:
    watched = Watched(bench, plan_of=blocking)
    bench.send({"loss": [1.0]}, [1])
    watched.engine.wake()
    assert ENTERED.wait(30)
    watched.pass_time(20)
    assert watched.told() == []
    for _ in range(3):
        watched.pass_time(26)
    [(event, alert)] = watched.told()
    assert event == "alert.firing"
    body = json.loads(bench.rows(delivery)[0]["body"])["data"]
    assert (body["alert"]["rule"], body["alert"]["severity"], body["run"]) == ("rules_stopped", "critical", None)
    assert "has not moved for 46 s" in body["alert"]["message"]
    MAY_GO_ON.set()
    watched.recover()
    assert watched.told() == [("alert.resolved", alert)], "the firing was not sent yet"
    watched.engine.stop()


def test_a_server_that_was_restarted_for_it_says_that_it_is_over(bench: Bench) -> None:
    watched = Watched(bench, plan_of=blocking)
    bench.send({"loss": [1.0]}, [1])
    watched.engine.wake()
    assert ENTERED.wait(30)
    watched.pass_time(50)
    [(_, alert)] = watched.told()
    MAY_GO_ON.set()
    watched.engine.stop()
    again = Watched(bench)
    again.recover()
    assert ("alert.resolved", alert) in again.told()
    assert {known for _, known in again.told()} == {alert}, "one alert"
    again.engine.stop()


def test_a_server_that_was_stopped_for_a_minute_tells_nothing(bench: Bench) -> None:
    watched = Watched(bench)
    watched.mono.at += 70
    watched.dog.look()  # the watchdog's thread may be the first that goes on
    watched.recover()
    assert watched.told() == []
    watched.engine.stop()


class Slow:
    """Rules of which those of each run take two seconds to make, and what the engine says of itself meanwhile. The first run
    waits at the gate."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.watched: Watched | None = None

    def __call__(self, project: str, off: Sequence[str]) -> Plan:
        if project and len(self.said) < RUNS:
            ENTERED.set()
            MAY_GO_ON.wait(60)
            assert self.watched is not None
            self.said.append(self.watched.engine.trouble())
            self.watched.mono.at += 2
        return default_plan(project, off)


RUNS = 30  # of which all together need more than the 45 s after which it is told that the rules stand still


@pytest.mark.parametrize("has_ended", [False, True])
def test_many_runs_that_are_loaded_after_a_start_are_no_trouble(bench: Bench, has_ended: bool) -> None:
    end = [Event(kind="state", time=NOW, step=1, data={"state": "finished"})] if has_ended else []
    for number in range(RUNS):
        bench.send({"loss": [1.0]}, [1], name=f"r{number}", events=end)
    if has_ended:  # and all were judged: it is their outcomes that are missing
        before = bench.engine()
        before.run_once()
        before.checkpoint()
    slow = Slow()
    slow.watched = Watched(bench, plan_of=slow)
    assert ENTERED.wait(30)
    MAY_GO_ON.set()
    until(lambda: len(slow.said) == RUNS, why="all runs are loaded")
    assert not any(slow.said)
    slow.watched.engine.stop()


class TwoSeconds(OddRule):
    """A rule that takes two seconds for a step, and what the engine says of itself meanwhile."""

    said: ClassVar[list[str]] = []
    watched: ClassVar[Watched]

    def judge(self, window: Window) -> Finding | None:
        if window.run != "canary":
            MAY_GO_ON.wait(60)
            self.said.append(self.watched.engine.trouble())
            self.watched.mono.at += 2
        return None


def test_a_run_that_is_made_anew_from_many_frames_is_no_trouble(bench: Bench) -> None:
    before = bench.engine()
    for step in range(1, RUNS + 1):
        bench.send({"loss": [1.0]}, [step])
    before.run_once()
    before.checkpoint()
    bench.database.write(lambda connection: connection.execute(update(rule_state).values(version=0)))
    bench.send({"loss": [1.0]}, [RUNS + 1])
    TwoSeconds.watched = Watched(bench, plan_of=lambda *_: Plan((*all_rules(), TwoSeconds())))
    MAY_GO_ON.set()
    until(lambda: len(TwoSeconds.said) > RUNS, why="all its frames are judged")
    assert not any(TwoSeconds.said)
    TwoSeconds.watched.engine.stop()


class Faulty:
    """A store whose tail cannot be read for now."""

    def __init__(self, store: Any, error: Exception | None) -> None:
        self._store, self.error = store, error

    def since(self, *arguments: Any, **options: Any) -> Any:
        if self.error is not None:
            raise self.error
        return self._store.since(*arguments, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def test_three_rounds_that_fail_are_told(bench: Bench) -> None:
    watched = Watched(bench, Faulty(bench.store, LookupError("a fault")))
    until(lambda: watched.engine.counters["failures"] >= 3, why="three rounds failed")
    watched.pass_time(0)
    assert [event for event, _ in watched.told()] == ["alert.firing"]
    assert "LookupError: a fault" in watched.dog.trouble
    watched.engine.stop()


def test_a_database_that_is_away_is_no_fault_of_the_rules(bench: Bench) -> None:
    store = Faulty(bench.store, StorageError("the database is away"))
    watched = Watched(bench, store)
    until(lambda: watched.engine.counters["failures"] >= 3, why="three rounds failed")
    for _ in range(3):
        watched.pass_time(10)
    assert (watched.dog.trouble, watched.told()) == ("", [])
    store.error = None
    watched.engine.wake()
    until(lambda: not watched.engine.waits_for_database, why="a round did not fail")
    watched.recover()
    assert watched.told() == []
    watched.engine.stop()


def test_rounds_that_fail_for_the_database_are_told_if_only_they_do(bench: Bench) -> None:
    watched = Watched(bench, Faulty(bench.store, StorageError("this table is broken")))
    until(lambda: watched.engine.counters["failures"] >= 3, why="three rounds failed")
    for _ in range(5):
        watched.pass_time(10)
    assert [event for event, _ in watched.told()] == ["alert.firing"]
    watched.engine.stop()


def test_a_frame_that_waits_while_the_rules_say_that_they_judge_is_told(bench: Bench) -> None:
    class Blind(Faulty):
        def since(self, *_arguments: Any, **_options: Any) -> Any:
            return []

    watched = Watched(bench, Blind(bench.store, None))
    until(lambda: watched.engine.judged()[1], why="the thread knows its runs")
    bench.send({"loss": [1.0]}, [1])
    watched.pass_time(0)
    for _ in range(5):
        until(lambda: not watched.engine.trouble(), why="the thread moves")
        watched.pass_time(15)
    assert watched.dog.trouble == "frames wait, and none was judged for 75 s"
    watched.engine.stop()


def test_a_test_run_whose_nan_raises_no_alert_is_told(bench: Bench) -> None:
    def broken(project: str, off: Sequence[str]) -> Plan:
        if not project:
            raise LookupError("no rules")
        return default_plan(project, off)

    watched = Watched(bench, plan_of=broken)

    watched.waits_for_trouble("LookupError: no rules")
    watched.engine.stop()


ROUTES = 40  # that wait at the same time: so many threads has anyio for them
WAITING = threading.Semaphore(0)


def wait() -> None:
    """A route that waits for the rules."""
    WAITING.release()
    MAY_GO_ON.wait(60)


def test_a_blocked_thread_reaches_a_webhook_while_all_routes_wait_for_it(tmp_path: Path) -> None:
    with Receiver() as receiver:
        settings = settings_for(tmp_path, webhook_allow=(receiver.address,))
        services = open_services(settings)
        new = channels.NewChannel(name="hook", url=receiver.url, projects=["another"])
        services.database.write(lambda connection: channels.create(connection, new, NOW))
        mono = Clock(1000.0)
        engine = Engine(services.database, services.store, monotonic=mono, plan_of=blocking)
        services.engine = engine
        services.watchdog = Watchdog(
            services.database, services.store, engine, server="http://here", link="http://here/",
            on_deliveries=services.outbox.wake, monotonic=mono,
        )  # fmt: skip
        app = create_app(settings, dashboard=False, services=services)
        app.add_api_route("/wait", wait)
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="on"))
        thread = threading.Thread(target=server.run)
        thread.start()
        asking = ThreadPoolExecutor(ROUTES + 10)
        headers = {"Content-Type": "application/x-msgpack", "Host": "127.0.0.1:8420"}
        web = httpx.Client(headers=headers, timeout=60, limits=httpx.Limits(max_connections=100))
        try:
            until(lambda: server.started, why="the server answers")
            url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
            web.post(f"{url}/api/v1/ingest", content=encode(frame({"loss": [1.0]}))).raise_for_status()
            assert ENTERED.wait(30)
            for _ in range(ROUTES + 10):
                asking.submit(web.get, f"{url}/wait")
            assert all(WAITING.acquire(timeout=30) for _ in range(ROUTES))
            mono.at += 46
            ready = web.get(f"{url}/readyz", timeout=20)
            assert ready.status_code == 503
            assert "has not moved for 46 s" in ready.json()["error"]["message"]
            shown = services.watchdog.finding()
            assert shown is not None
            until(lambda: receiver.of_type("alert.firing"), why="the channel is told")
            [told] = receiver.of_type("alert.firing")
            assert told.json["data"]["alert"]["rule"] == "rules_stopped"
            assert told.headers["webhook-signature"].startswith("v1,")
        finally:
            MAY_GO_ON.set()
            asking.shutdown()
            web.close()
            server.should_exit = True
            thread.join(30)


def test_the_overview_shows_that_the_rules_have_stopped_and_not_that_all_is_well() -> None:
    finding = {
        "rule": "rules_stopped", "severity": "critical", "title": "The rules of the server have stopped",
        "message": "They stand.", "since": "2026-01-01T00:00:00Z", "fix": "Restart it.",
    }  # fmt: skip
    severities = {"critical": 0, "warning": 0, "info": 0, "healthy": 1}
    runs = {"counts": {"all": 1, "attention": 0, "severities": severities}, "runs": [], "total": 0}

    class Api:
        async def get(self, path: str, **_: Any) -> dict[str, Any]:
            return {
                "/alerts": {"alerts": []}, "/runs": runs, "/session": {}, "/self": {"rules_stopped": finding},
            }[path]  # fmt: skip

    page = overview.page(Api(), "http://here")  # type: ignore[arg-type]
    text = str(asyncio.run(page.layout()).to_plotly_json())
    assert "The rules of the server have stopped" in text
    assert "all-well" not in text


def refuses(_run: str) -> str:
    """A link that fails every message."""
    raise LookupError("no address")


def test_a_test_run_whose_alert_cannot_be_written_is_told(bench: Bench) -> None:
    watched = Watched(bench, link=refuses)

    watched.waits_for_trouble("LookupError: no address")
    assert bench.rows(alert) == bench.rows(run) == []
    watched.engine.stop()


def test_alerts_of_three_runs_that_cannot_be_written_are_trouble(bench: Bench) -> None:
    broken = [True]
    engine = bench.engine(link=lambda name: refuses(name) if broken else name, clock=Clock(NOW))
    for name in "abc":
        assert engine.trouble() == ""
        bench.send({"loss": [2.0, math.nan]}, [1, 2], name=name)
        engine.run_once()
    assert engine.trouble() == "no alert of the last 3 runs could be written"
    broken.clear()
    bench.send({"loss": [2.0, math.nan]}, [1, 2], name="d")
    engine.run_once()
    assert engine.trouble() == ""
