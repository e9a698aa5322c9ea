"""Two servers on one PostgreSQL, each behind its own socket: what one takes, both know; each run is judged by one."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import postgresql_server
import psycopg
import pytest
from api_builders import ADMIN, MSGPACK, Listening, frame, listening
from builders import Delivery, Receiver, until
from sqlalchemy import Connection
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from perfagent.errors import ConfigError, ResourceError
from perfagent.wire import Event, Frame, encode
from perfagent_server.database import StorageError, open_database, postgresql
from perfagent_server.replicas import leases
from perfagent_server.security import keys
from perfagent_server.services import Services, open_services
from perfagent_server.settings import Settings
from perfagent_server.store.changes import newest_deletion
from perfagent_server.store.retention import DAY_S, Retention, RetentionPolicy
from perfagent_server.store.shards import SHARDS, STORAGE, LeaseLost, shard_of
from perfagent_server.store.statements import pipelined

pytestmark = pytest.mark.postgresql

PEPPER = "a-pepper-that-both-servers-have"


@dataclass
class Server:
    """One of the two. Requests go to it and to no other."""

    running: Listening

    @property
    def services(self) -> Services:
        found: Services = self.running.app.state.services
        return found

    @property
    def held(self) -> frozenset[str]:
        assert self.services.replica is not None
        return frozenset(self.services.replica.leases.held)

    def judges(self, run: str) -> bool:
        return shard_of(run) in self.held

    def send(self, sent: Frame) -> httpx.Response:
        return self.request("POST", "/ingest", content=encode(sent), headers=MSGPACK)

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        headers = {**ADMIN, **options.pop("headers", {})}
        answer = httpx.request(method, f"{self.running.url}/api/v1{path}", headers=headers, timeout=30, **options)
        assert answer.status_code < 300, answer.text
        return answer

    def get(self, path: str, **params: Any) -> Any:
        return self.request("GET", path, params=params).json()

    @contextlib.contextmanager
    def page(self, **subscription: Any) -> Iterator[ClientConnection]:
        with connect(f"ws://127.0.0.1:{self.running.settings.port}/ws/live", max_size=None) as socket:
            socket.send(json.dumps({"subscribe": {"runs": "*", "names": "*", **subscription}}))
            assert json.loads(socket.recv(timeout=10))["subscribed"] is True
            yield socket


@contextlib.contextmanager
def replica(folder: Path, database: str, **changes: Any) -> Iterator[Server]:
    with listening(
        folder, database=database, replica=True, key_pepper=PEPPER, webhook_allow=("127.0.0.1",), **changes
    ) as running:
        yield Server(running)


@pytest.fixture(autouse=True)
def _quick_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "EVERY_S", 0.2)


@pytest.fixture
def database(tmp_path: Path) -> str:
    return postgresql_server.database_of(tmp_path / "shared")


@pytest.fixture
def pair(tmp_path: Path, database: str) -> Iterator[tuple[Server, Server]]:
    with replica(tmp_path / "a", database) as a, replica(tmp_path / "b", database) as b:
        until(lambda: len(a.held) == len(b.held) == 8, why="each holds half of the shards")
        yield a, b


def run_of(server: Server, number: int = 0) -> str:
    """The id of a run that this server judges."""
    return [name for name in map("run-{}".format, range(200)) if server.judges(name)][number]


def receive(socket: ClientConnection, key: str, *, within_s: float = 20.0) -> Any:
    end = time.monotonic() + within_s
    while True:
        message = json.loads(socket.recv(timeout=max(end - time.monotonic(), 0.001)))
        if key in message:
            return message[key]


def started(**data: Any) -> Event:
    return Event(kind="state", time=1_700_000_000.0, step=0, data={"state": "running", **data})


@pytest.mark.sql
def test_the_shards_are_divided_and_go_to_the_other_at_the_end(tmp_path: Path, database: str) -> None:
    with replica(tmp_path / "a", database) as a:
        assert a.held == frozenset(SHARDS)
        with replica(tmp_path / "b", database) as b:
            until(lambda: len(a.held) == len(b.held) == 8, why="each holds half of the shards")
            assert a.held | b.held == frozenset(SHARDS)
        until(lambda: a.held == frozenset(SHARDS), why="what the other had is free")


@pytest.mark.sql
def test_what_either_server_takes_is_stored_once(pair: tuple[Server, Server]) -> None:
    a, b = pair
    run = run_of(a)
    for step in range(1, 21):
        a.send(frame({"loss": [float(step)], "step_time_s": [0.1]}, run=run, rank=0, seq=step, first_step=step))
        b.send(frame({"loss": [float(step)], "step_time_s": [0.2]}, run=run, rank=1, seq=step, first_step=step))
    again = b.send(frame({"loss": [7.0], "step_time_s": [0.1]}, run=run, rank=0, seq=7, first_step=7)).json()
    assert (again["stored"], again["duplicate"]) == (0, 2), "a frame that another server has stored"
    for server in pair:
        series = server.get(f"/runs/{run}/series", name="loss", points=100)
        assert series["count"] == [2] * 20
        assert series["mean"] == [float(step) for step in range(1, 21)]
        assert server.get(f"/runs/{run}")["step"] == 20


@pytest.mark.sql
def test_rows_of_programs_count_on_whichever_server_takes_them(pair: tuple[Server, Server]) -> None:
    for number in range(20):
        pair[number % 2].request("POST", "/log", json={"run": "curl", "metrics": {"loss": float(number)}})
    (run,) = pair[0].get("/runs", name="curl")["runs"]
    series = pair[1].get(f"/runs/{run['run']}/series", name="loss")
    assert (series["step"], series["mean"]) == (list(range(1, 21)), [float(number) for number in range(20)])

    def log(number: int) -> int:
        row = {"run": "shared", "rank": number, "step": 1, "metrics": {"loss": 1.0}}
        return pair[number % 2].request("POST", "/log", json=row).status_code

    with ThreadPoolExecutor(24) as pool:
        assert set(pool.map(log, range(48))) == {200}, "many at once"
    assert len(pair[0].get("/runs", name="shared")["runs"]) == 1


@pytest.mark.sql
def test_an_alert_fires_once_and_is_resolved_through_either(pair: tuple[Server, Server]) -> None:
    a, b = pair
    with Receiver() as receiver:
        a.request("POST", "/channels", json={"name": "hook", "kind": "webhook", "url": receiver.url})
        for number in range(4):
            for judge, taker in ((a, b), (b, a)):
                run = run_of(judge, number)
                taker.send(frame({"loss": [1.0, float("nan"), 1.0]}, run=run, events=[started()]))
        runs = [run_of(judge, number) for judge in pair for number in range(4)]
        until(lambda: {call.json["data"]["run"] for call in told(receiver)} == set(runs), why="each run's NaN is told")
        for server in pair:
            fired = [one for one in server.get("/alerts")["alerts"] if one["rule"] == "nonfinite_loss"]
            assert sorted(one["run"] for one in fired) == sorted(runs)
            assert server.get(f"/runs/{runs[0]}/verdict")["rule"] == "nonfinite_loss"
            assert server.get(f"/runs/{runs[0]}/findings")["findings"]
        time.sleep(1.0)
        assert len(told(receiver)) == len(runs), "each alert is told once"
    for judge, other in (pair, pair[::-1]):
        run = run_of(judge)
        (alert,) = other.get("/alerts", run=run)["alerts"]
        other.request("POST", f"/alerts/{alert['id']}/resolve", json={"note": "seen"})
        assert state_of(judge, alert["id"]) == "resolved"
        judge.send(frame({"loss": [1.0] * 3}, run=run, seq=9, first_step=4))
        time.sleep(0.5)
        assert state_of(judge, alert["id"]) == "resolved", "its machine knows"


def told(receiver: Receiver) -> list[Delivery]:
    """What a receiver was told of NaN."""
    fired = receiver.of_type("alert.firing")
    return [one for one in fired if one.json["data"]["alert"]["rule"] == "nonfinite_loss"]


def test_a_page_sees_what_another_server_took_and_judged(pair: tuple[Server, Server]) -> None:
    a, b = pair
    seq = iter(range(10, 10_000))

    def watched() -> bool:
        return b.send(frame({}, run=run_of(a), seq=next(seq))).headers.get("perfagent-watched") != "0"

    for judge in pair:
        run = run_of(judge)
        with a.page() as page:
            b.send(frame({"loss": [1.5, float("nan")]}, run=run, events=[started()]))
            (sample,) = receive(page, "samples")
            assert (sample["run"], sample["step"], sample["value"]) == (run, [1, 2], [1.5, "NaN"])
            assert receive(page, "alert")["run"] == run
            until(watched, why="agents hear of the page on the other server")
        until(lambda: not watched(), why="it was closed")
    with b.page() as page:
        b.send(frame({"loss": [1.5]}, run=run_of(a), seq=2, first_step=3))
        (sample,) = receive(page, "samples")
        assert sample["step"] == [3], "also what the page's own server took, once"


def state_of(server: Server, alert: str) -> str:
    return next(str(one["state"]) for one in server.get("/alerts")["alerts"] if one["id"] == alert)


@pytest.mark.sql
def test_what_is_deleted_or_changed_on_one_server_is_so_on_both(pair: tuple[Server, Server]) -> None:
    a, b = pair
    for number, run in enumerate((run_of(a), run_of(b))):
        b.send(frame({"loss": [1.0], "lr": [0.1]}, run=run, seq=1))
        a.request("DELETE", f"/runs/{run}")
        b.send(frame({"loss": [2.0], "lr": [0.1]}, run=run, seq=2, first_step=5 + number))
        for server in pair:
            assert server.get(f"/runs/{run}/series", name="loss")["mean"] == [2.0], "it begins anew"
            assert sorted(server.get(f"/runs/{run}/names")["names"]) == ["loss", "lr"]
    a.request("PUT", "/rules/nonfinite_loss", json={"enabled": False})

    def is_enabled() -> bool:
        return bool(next(one for one in b.get("/rules")["rules"] if one["rule"] == "nonfinite_loss")["enabled"])

    until(lambda: not is_enabled(), why="the other server has heard of it")
    a.send(frame({"loss": [1.0, float("nan")]}, run=run_of(b, 1), events=[started()]))
    time.sleep(1.0)
    assert not [one for one in a.get("/alerts")["alerts"] if one["rule"] == "nonfinite_loss"]


@pytest.mark.sql
def test_a_command_reaches_an_agent_of_the_other_server_once(pair: tuple[Server, Server]) -> None:
    a, b = pair
    b.send(frame({"loss": [1.0]}, events=[started()]))
    asked = a.request("POST", "/runs/r1/commands", json={"kind": "stacks"}).json()
    seq = iter(range(2, 1000))

    def handed() -> list[str]:
        return [one["id"] for one in b.send(frame({}, seq=next(seq))).json()["commands"]]

    until(lambda: handed() == [asked["id"]], why="the command")
    assert handed() == []
    answer = Event(kind="command", time=1.0, step=None, data={"command": asked["id"], "state": "done"})
    b.send(frame({}, seq=next(seq), events=[answer]))
    (command,) = a.get("/runs/r1/commands")["commands"]
    assert command["state"] == "done"

    def shown() -> list[int]:
        texts = [httpx.get(f"{server.running.url}/metrics", headers=ADMIN, timeout=30).text for server in pair]
        return [text.count("perfagent_run_step{") for text in texts]

    until(lambda: sorted(shown()) == [0, 1], why="one of the two shows the run to Prometheus")


@pytest.mark.sql
def test_servers_that_do_not_fit_together_are_refused(
    tmp_path: Path, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is alone beside replicas, the other way round, one with other secrets, and one without PostgreSQL."""
    monkeypatch.setattr(postgresql, "_ADMITTED_S", 0.5)
    settings = Settings(data=tmp_path / "c", database=database)
    with replica(tmp_path / "a", database):
        with pytest.raises(ResourceError, match="--replica"):
            open_services(settings)
        with pytest.raises(ResourceError, match="PERFAGENT_KEY_PEPPER"):
            open_services(replace(settings, replica=True))
    alone = open_database(settings, alone=True)
    with pytest.raises(ResourceError, match="without --replica"):
        open_database(settings, replica="b")
    alone.close()
    with pytest.raises(ConfigError, match="need PostgreSQL"):
        open_services(Settings(data=tmp_path, replica=True))


@pytest.mark.sql
def test_who_may_in_is_the_same_on_both(pair: tuple[Server, Server]) -> None:
    here, there = pair
    form = {"name": "ada", "password": "correct horse battery"}
    here.request("POST", "/users", json=form | {"roles": [{"role": "viewer", "project": "p"}]})
    cookie = httpx.post(f"{there.running.url}/login", data=form).headers["set-cookie"].partition(";")[0]
    assert httpx.get(f"{here.running.url}/api/v1/session", headers={"Cookie": cookie}).json()["name"] == "ada"
    address = f"ws://127.0.0.1:{there.running.settings.port}/ws/live"
    with connect(address, additional_headers={"Cookie": cookie}) as page:
        here.request("PATCH", "/users/ada", json={"disabled": True})
        with pytest.raises(ConnectionClosed) as closed:
            page.recv(timeout=8)  # sooner than the page would ask by itself
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 1008
    known = httpx.get(f"{there.running.url}/api/v1/session", headers={"Cookie": cookie}).json()
    assert known["who"] == "anyone"
    token = here.request("POST", "/session/links").json()["url"].partition("token=")[2]
    links = [httpx.get(f"{one.running.url}/login", params={"token": token}, timeout=30) for one in (there, here)]
    assert [one.status_code for one in links] == [303, 401], "a one-time address is good once"
    guess = {"name": "bob", "password": "a guess at it"}
    statuses = [httpx.post(f"{pair[turn % 2].running.url}/login", data=guess).status_code for turn in range(6)]
    assert statuses == [401] * 5 + [429], "guesses at both servers are counted together"


@pytest.mark.sql
def test_a_key_is_valid_and_revoked_on_the_other_server_at_once(
    tmp_path: Path, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        replica(tmp_path / "a", database, auth="required") as a,
        replica(tmp_path / "b", database, auth="required") as b,
    ):

        def is_valid(key: str) -> bool:
            headers = {"Authorization": f"Bearer {key}"}
            return httpx.get(f"{b.running.url}/api/v1/runs", headers=headers, timeout=30).status_code == 200

        earlier = a.request("POST", "/keys", json={"scope": "read"}).json()["key"]
        until(lambda: is_valid(earlier), why="the other server has read the keys that there were")
        monkeypatch.setattr(keys, "_RELOAD_S", 3600.0)  # it must be told
        made = a.request("POST", "/keys", json={"scope": "read"}).json()
        until(lambda: is_valid(made["key"]), why="the other server knows the key")
        a.request("DELETE", f"/keys/{made['id']}")
        until(lambda: not is_valid(made["key"]), why="the key still opens the other server")


def take_and_give_back(database: str, name: str) -> None:
    """As if another server had held the lease meanwhile. Takes its turn, as every writer does: a renewal that has read the
    old term would write it over the new one."""
    with psycopg.connect(database) as connection:
        connection.execute(f"SELECT pg_advisory_xact_lock({postgresql._LOCKS}, {postgresql._WRITE})")
        connection.execute("UPDATE lease SET term = term + 2 WHERE name = %s", [name])


@pytest.mark.sql
def test_retention_deletes_nothing_more_when_its_lease_is_gone(tmp_path: Path, database: str) -> None:
    with replica(tmp_path / "a", database) as a:
        assert a.services.replica is not None
        for run in ("first", "second"):
            ended = Event(kind="state", time=time.time(), data={"state": "finished"})
            a.send(frame({"loss": [1.0]}, run=run, events=[ended]))
        retention = Retention(
            a.services.database, a.services.store, RetentionPolicy(runs_days=0.5), clock=lambda: time.time() + DAY_S,
            on_deleted=lambda _run: take_and_give_back(database, STORAGE), leases=a.services.replica.leases,
        )  # fmt: skip

        def stops() -> bool:
            """On a busy machine the lease may be renewed too late. A round then does nothing."""
            with contextlib.suppress(LeaseLost):
                retention.run_once()
                return False
            return True

        until(stops, why="it goes on deleting without its lease")
        assert len(a.get("/runs")["runs"]) == 1


@pytest.mark.sql
def test_a_server_that_stops_in_its_turn_loses_it(
    tmp_path: Path, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also inside a pipeline, where PostgreSQL does not see that a transaction idles."""
    monkeypatch.setattr(postgresql, "_TURN_IDLE_S", 2)
    place = Settings(data=tmp_path, database=database)
    stopped, other = open_database(place, replica="a"), open_database(place, replica="b")
    entered, may_end = threading.Event(), threading.Event()

    def stops(connection: Connection) -> None:
        with pipelined(connection):
            newest_deletion(connection)
            entered.set()
            may_end.wait(60)

    held = stopped.submit(stops)
    assert entered.wait(10)

    def writes() -> bool:
        with contextlib.suppress(StorageError):
            other.write(lambda _connection: None)
            return True
        return False

    until(writes, within_s=30.0, why="the other server writes")
    may_end.set()
    assert held.exception() is not None
    stopped.close()
    other.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_server_whose_rules_thread_ended_gives_its_runs_up(
    pair: tuple[Server, Server], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    a, b = pair
    run = run_of(a)
    a.send(frame({"loss": [1.0]}, run=run, events=[started()]))

    def ends() -> None:
        raise SystemExit

    monkeypatch.setattr(a.services.engine, "_work", ends)
    a.services.engine.wake()
    until(lambda: b.held == frozenset(SHARDS), why="the other server judges all runs")
    assert not a.held
    assert "the other servers judge the runs of this one" in caplog.text
    assert httpx.get(f"{a.running.url}/readyz", timeout=30).status_code == 503
    a.send(frame({"loss": [float("nan")]}, run=run, seq=2, first_step=2))
    until(lambda: b.get("/alerts", run=run)["alerts"], why="the alert")
