"""The server says itself that its rules have stopped, to /readyz and to every channel, and that they judge again."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from api_builders import frame, send, settings_for
from builders import until
from clocks import Clock
from engine_bench import NOW, Bench, OddRule
from fastapi.testclient import TestClient
from posting import Posts
from sqlalchemy import update

from perfagent.wire import Event, Finding
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


class Blocking(OddRule):
    """A rule that stands still."""

    def judge(self, window: Window) -> Finding | None:
        if window.run != "canary":
            ENTERED.set()
            MAY_GO_ON.wait(60)
        return None


def blocking(*_: Any) -> Plan:
    return Plan((*all_rules(), Blocking()))


class Watched:
    """An engine whose thread runs, by a clock that is turned by hand, and its watchdog. Stops at the end of its block."""

    def __enter__(self) -> Watched:
        return self

    def __exit__(self, *_: object) -> None:
        MAY_GO_ON.set()
        self.engine.stop()

    def __init__(self, bench: Bench, store: Any = None, **options: Any) -> None:
        self.bench, self.mono = bench, Clock(1000.0)
        self.engine = Engine(bench.database, store or bench.store, clock=Clock(NOW), monotonic=self.mono, **options)
        self.dog = Watchdog(
            bench.database, bench.store, self.engine, server="http://here", link="http://here/", on_deliveries=lambda: None,
            clock=Clock(NOW), monotonic=self.mono,
        )  # fmt: skip
        self.engine.start()

    def judges_test_runs_until(self, error: str) -> bool:
        """Whether they have failed three times with this error."""
        self.mono.at += 1
        self.engine.wake()
        return error in self.dog.trouble

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
@pytest.mark.parametrize("is_restarted", [True, False])
def test_a_rule_that_blocks_is_told_once_and_so_is_its_end(bench: Bench, is_restarted: bool) -> None:
    """Its end by the next server, if it was restarted for that."""
    bench.send({"loss": [1.0]}, [1])
    with Watched(bench, plan_of=blocking) as watched:
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
        if not is_restarted:
            MAY_GO_ON.set()
            watched.recover()
            assert watched.told() == [("alert.resolved", alert)]
            return
    with Watched(bench) as again:
        again.recover()
        assert again.told() == [("alert.resolved", alert)], "the firing was not sent yet"


def test_a_server_that_was_stopped_for_a_minute_tells_nothing(bench: Bench) -> None:
    with Watched(bench) as watched:
        watched.mono.at += 70
        watched.dog.look()  # the watchdog's thread may be the first that goes on
        watched.recover()
        assert watched.told() == []


RUNS = 30  # of which all together need more than the 45 s after which it is told that the rules stand still


class Slow:
    """Two seconds pass at each call; what the engine says of itself meanwhile. The first waits until it is watched."""

    def __init__(self) -> None:
        self.said, self.watched = list[str](), list[Watched]()

    def __call__(self) -> None:
        MAY_GO_ON.wait(60)
        self.said.append(self.watched[0].engine.trouble())
        self.watched[0].mono.at += 2

    def watch(self, watched: Watched, count: int) -> None:
        self.watched.append(watched)
        MAY_GO_ON.set()
        until(lambda: len(self.said) >= count, why="all is loaded and judged")
        assert not any(self.said)


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

    def plan_of(project: str, off: Sequence[str], _tags: Sequence[str] = ()) -> Plan:
        if project and len(slow.said) < RUNS:
            slow()
        return default_plan(project, off)

    with Watched(bench, plan_of=plan_of) as watched:
        slow.watch(watched, RUNS)


def test_a_run_that_is_made_anew_from_many_frames_is_no_trouble(bench: Bench) -> None:
    before = bench.engine()
    for step in range(1, RUNS + 1):
        bench.send({"loss": [1.0]}, [step])
    before.run_once()
    before.checkpoint()
    bench.write(update(rule_state).values(version=0))
    bench.send({"loss": [1.0]}, [RUNS + 1])
    slow = Slow()

    class TwoSeconds(OddRule):
        def judge(self, window: Window) -> Finding | None:
            if window.run != "canary":
                slow()
            return None

    with Watched(bench, plan_of=lambda *_: Plan((*all_rules(), TwoSeconds()))) as watched:
        slow.watch(watched, RUNS + 1)


class Faulty:
    """A store whose tail cannot be read for now, or seems to be empty."""

    def __init__(self, store: Any, error: Exception | None) -> None:
        self._store, self.error, self.is_blind = store, error, error is None

    def since(self, *arguments: Any, **options: Any) -> Any:
        if self.error is not None:
            raise self.error
        return [] if self.is_blind else self._store.since(*arguments, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


@pytest.mark.parametrize(
    ("error", "after_s"), [(LookupError("a fault"), 0), (StorageError("this table is broken"), 50)]
)
def test_three_rounds_that_fail_are_told(bench: Bench, error: Exception, after_s: int) -> None:
    """Those that fail for the database later, and if only they do: see the next test."""
    with Watched(bench, Faulty(bench.store, error)) as watched:
        until(lambda: watched.engine.counters["failures"] >= 3, why="three rounds failed")
        watched.pass_time(0)
        for _ in range(after_s // 10):
            watched.pass_time(10)
        assert [event for event, _ in watched.told()] == ["alert.firing"]
        assert after_s or "LookupError: a fault" in watched.dog.trouble


def test_a_database_that_is_away_is_no_fault_of_the_rules(bench: Bench) -> None:
    store = Faulty(bench.store, StorageError("the database is away"))
    with Watched(bench, store) as watched:
        until(lambda: watched.engine.counters["failures"] >= 3, why="three rounds failed")
        for _ in range(3):
            watched.pass_time(10)
        assert (watched.dog.trouble, watched.told()) == ("", [])
        store.error = None
        watched.engine.wake()
        until(lambda: not watched.engine.waits_for_database, why="a round did not fail")
        watched.recover()
        assert watched.told() == []


def test_frame_that_waits_while_the_rules_judge_is_told(bench: Bench) -> None:
    with Watched(bench, Faulty(bench.store, None)) as watched:
        until(lambda: watched.engine.judged()[1], why="the thread knows its runs")
        bench.send({"loss": [1.0]}, [1])
        watched.pass_time(0)
        for _ in range(5):
            until(lambda: not watched.engine.trouble(), why="the thread moves")
            watched.pass_time(15)
        assert watched.dog.trouble == "frames wait, and none was judged for 75 s"


def refuses(_run: str) -> str:
    """A link that fails every message."""
    raise LookupError("no address")


def no_rules(project: str, off: Sequence[str], _tags: Sequence[str]) -> Plan:
    """Those of the server's own test run cannot be made."""
    if not project:
        raise LookupError("no rules")
    return default_plan(project, off)


@pytest.mark.parametrize(
    ("options", "error"),
    [({"plan_of": no_rules}, "LookupError: no rules"), ({"link": refuses}, "LookupError: no address")],
)
def test_a_test_run_that_cannot_be_judged_or_told_is_told(bench: Bench, options: dict[str, Any], error: str) -> None:
    with Watched(bench, **options) as watched:
        until(lambda: watched.judges_test_runs_until(error), why="the test run failed three times")
        assert bench.rows(alert) == bench.rows(run) == []


def test_alerts_of_three_runs_that_cannot_be_written_are_trouble(bench: Bench) -> None:
    broken = [True]
    engine = bench.engine(link=lambda name: refuses(name) if broken else name, clock=Clock(NOW))
    for name in "abcd":
        assert engine.trouble() == ("no alert of the last 3 runs could be written" if name == "d" else "")
        broken[:] = broken if name != "d" else []
        bench.send({"loss": [2.0, math.nan]}, [1, 2], name=name)
        engine.run_once()
    assert engine.trouble() == ""


ROUTES = 40  # that wait at the same time: so many threads has anyio for them


def test_a_blocked_thread_is_told_while_all_routes_wait_for_it(tmp_path: Path) -> None:
    waiting, posts, mono = threading.Semaphore(0), Posts(), Clock(1000.0)
    services = open_services(settings_for(tmp_path), send=posts)
    new = channels.NewChannel(name="hook", url=posts.url, projects=["another"])
    services.database.write(lambda connection: channels.create(connection, new, NOW))
    services.engine = engine = Engine(services.database, services.store, monotonic=mono, plan_of=blocking)
    services.watchdog = Watchdog(
        services.database, services.store, engine, server="http://here", link="http://here/",
        on_deliveries=services.outbox.wake, monotonic=mono,
    )  # fmt: skip
    app = create_app(services.settings, dashboard=False, services=services)
    app.add_api_route("/wait", lambda: waiting.release() or MAY_GO_ON.wait(60))
    with TestClient(app, base_url="http://127.0.0.1:8420") as client, ThreadPoolExecutor(ROUTES + 10) as asking:
        send(client, frame({"loss": [1.0]}))
        assert ENTERED.wait(30)
        for _ in range(ROUTES + 10):
            asking.submit(client.get, "/wait")
        assert all(waiting.acquire(timeout=20) for _ in range(ROUTES))
        mono.at += 46
        ready = client.get("/readyz")
        assert ready.status_code == 503
        assert "has not moved for 46 s" in ready.json()["error"]["message"]
        assert services.watchdog.finding() is not None
        [told] = until(lambda: posts.of_type("alert.firing"), why="the channel is told")
        MAY_GO_ON.set()
    assert told.json["data"]["alert"]["rule"] == "rules_stopped"
    assert told.headers["webhook-signature"].startswith("v1,")


def test_the_overview_shows_that_the_rules_have_stopped() -> None:
    finding = {
        "rule": "rules_stopped", "severity": "critical", "title": "The rules of the server have stopped",
        "message": "They stand.", "since": "2026-01-01T00:00:00Z", "fix": "Restart it.",
    }  # fmt: skip
    severities = {"critical": 0, "warning": 0, "info": 0, "healthy": 1}
    runs = {"counts": {"all": 1, "attention": 0, "severities": severities}, "runs": [], "total": 0}
    answers = {"/alerts": {"alerts": []}, "/runs": runs, "/session": {}, "/self": {"rules_stopped": finding}}

    class Api:
        async def get(self, path: str, **_: Any) -> Any:
            return answers[path]

    page = overview.page(Api(), "http://here")  # type: ignore[arg-type]
    text = str(asyncio.run(page.layout()).to_plotly_json())
    assert "The rules of the server have stopped" in text
    assert "all-well" not in text
