"""Leases that change hands all the time, without a word to those who held them: nothing is lost, counted twice or told
twice."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import postgresql_server
import psycopg
import pytest
from api_builders import MSGPACK, frame, listening
from builders import Receiver, until, web

from perfagent.wire import Event, encode
from perfagent_server.database import postgresql
from perfagent_server.replicas import leases
from perfagent_server.services import Services
from perfagent_server.store.shards import SHARDS

pytestmark = pytest.mark.postgresql

RUNS, STEPS = 12, 120


def swap(database: str, chance: random.Random, stop: threading.Event) -> None:
    """Hands some shards to the other server, as if their holder had stopped for longer than its lease. Takes its turn, as
    every writer does."""
    turn = f"SELECT pg_advisory_xact_lock({postgresql._LOCKS}, {postgresql._WRITE})"
    other = "(SELECT id FROM server WHERE id <> lease.server LIMIT 1)"
    hand_over = f"UPDATE lease SET server = coalesce({other}, server), term = term + 1 WHERE name = ANY(%s)"
    while not stop.wait(0.25):
        with psycopg.connect(database) as connection:
            connection.execute(turn)
            connection.execute(hand_over, [chance.sample(SHARDS, 6)])


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 8))])
def test_leases_change_hands_under_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr(leases, "EVERY_S", 0.4)
    chance = random.Random(seed)
    database = postgresql_server.database_of(tmp_path / "shared")
    options = {"database": database, "replica": True, "key_pepper": "x" * 20, "webhook_allow": ("127.0.0.1",)}
    nan_at = {number: chance.randrange(20, STEPS - 20) for number in range(0, RUNS, 2)}
    with (
        Receiver() as receiver,
        listening(tmp_path / "a", **options) as a,
        listening(tmp_path / "b", **options) as b,
    ):
        both: list[Services] = [a.app.state.services, b.app.state.services]
        for services in both:
            services.compactor.policy = replace(services.compactor.policy, frames=5, pause_s=0.05, age_s=0.5)
        hook = {"name": "hook", "kind": "webhook", "url": receiver.url}
        admin = {"Authorization": f"Bearer {a.settings.admin_token}"}
        web().post(f"{a.url}/api/v1/channels", json=hook, headers=admin).raise_for_status()
        stop = threading.Event()
        swapping = threading.Thread(target=swap, args=(database, random.Random(seed), stop), daemon=True)
        swapping.start()
        for step in range(1, STEPS + 1):
            for number in range(RUNS):
                loss = float("nan") if nan_at.get(number) == step else 1.0 / step
                state = Event(kind="state", time=time.time(), step=step, data={"state": "running"})
                sent = frame({"loss": [loss]}, run=f"run-{number}", seq=step, first_step=step, events=[state])
                to = chance.choice((a, b))
                answer = web().post(f"{to.url}/api/v1/ingest", content=encode(sent), headers=MSGPACK, timeout=30)
                assert answer.status_code == 200, answer.text
        expected = {f"run-{number}" for number in nan_at}
        told = receiver.of_type
        until(lambda: {one.json["data"]["run"] for one in told("alert.firing")} >= expected, why="each NaN is told")
        stop.set()
        swapping.join()
        until(lambda: sum(services.compactor.counters["rows"] for services in both) > 0, why="something is compacted")
        assert sum(services.replica.counters["lost"] for services in both if services.replica) > 0, "nothing was fenced"
        time.sleep(1.5)
        ids = {one.headers["webhook-id"]: one.json["data"]["run"] for one in told("alert.firing")}
        assert Counter(ids.values()) == dict.fromkeys(expected, 1)
        alerts = web().get(f"{b.url}/api/v1/alerts", params={"limit": 1000}, headers=admin).json()["alerts"]
        assert Counter(one["run"] for one in alerts if one["rule"] == "nonfinite_loss") == dict.fromkeys(expected, 1)
        for number in range(RUNS):
            rows = [row for row in both[0].store.samples(f"run-{number}") if row.name == "loss"]
            assert [row.step for row in rows] == list(range(1, STEPS + 1))
            series = both[1].store.series(f"run-{number}", "loss")
            assert sum(series.count) == STEPS
            assert sum(series.nonfinite) == (number in nan_at)
