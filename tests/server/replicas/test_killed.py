"""Two server processes behind a proxy, one of which is killed again and again: nothing acknowledged is lost or there
twice, pages on the other one stay live, and each alert fires and is delivered once."""

from __future__ import annotations

import contextlib
import json
import random
import time
from collections import Counter
from pathlib import Path

import httpx
import postgresql_server
import pytest
from api_builders import ADMIN_TOKEN, MSGPACK, frame
from builders import Receiver, ServerProcess, until
from frame_sender import FrameSender, stored_once
from round_robin import RoundRobin
from websockets.sync.client import connect

from perfagent.wire import Event, encode

pytestmark = [pytest.mark.postgresql, pytest.mark.timeout(1800)]


def fail(url: str, run: str) -> None:
    """A job whose loss becomes NaN."""
    begun = Event(kind="state", time=time.time(), step=0, data={"state": "running"})
    body = encode(frame({"loss": [1.0, float("nan"), 1.0]}, run=run, events=[begun]))

    def sent() -> bool:
        with contextlib.suppress(httpx.TransportError):
            return httpx.post(f"{url}/api/v1/ingest", content=body, headers=MSGPACK, timeout=20).status_code == 200
        return False

    until(sent, why="the frame is acknowledged")


def assert_live(server: ServerProcess, run: str) -> None:
    """A page on this server sees the samples of a run come."""
    with connect(f"ws://127.0.0.1:{server.port}/ws/live", max_size=None) as page:
        page.send(json.dumps({"subscribe": {"runs": [run], "names": ["loss"]}}))
        until(lambda: "samples" in json.loads(page.recv(timeout=20)), why="samples on the page")


@pytest.mark.parametrize("kills", [3, pytest.param(50, marks=pytest.mark.long)])
def test_one_of_two_servers_is_killed(tmp_path: Path, kills: int) -> None:
    chance = random.Random(5)
    with Receiver() as receiver, contextlib.ExitStack() as cleaning:
        common = {
            "PERFAGENT_DATABASE": postgresql_server.database_of(tmp_path / "shared"),
            "PERFAGENT_ADMIN_TOKEN": ADMIN_TOKEN,
            "PERFAGENT_KEY_PEPPER": "a-pepper-of-the-tests",
            "PERFAGENT_WEBHOOK_ALLOW": receiver.address,
        }
        servers = [ServerProcess(tmp_path / name, env=common, options=("--replica",)) for name in ("a", "b")]
        for server in servers:
            cleaning.callback(server.stop)
            server.start()
        proxy = cleaning.enter_context(RoundRobin([server.port for server in servers]))
        hook = {"name": "hook", "kind": "webhook", "url": receiver.url}
        httpx.post(
            f"{proxy.url}/api/v1/channels", json=hook, headers={"Authorization": f"Bearer {ADMIN_TOKEN}"}
        ).raise_for_status()
        sender = FrameSender(proxy.url)
        sender.start()
        cleaning.callback(sender.stop)
        for number in range(kills):
            victim, other = chance.sample(servers, 2)
            time.sleep(chance.random())
            fail(proxy.url, f"nan-{number}-before")
            victim.kill()
            fail(proxy.url, f"nan-{number}-after")
            assert_live(other, "one")
            victim.start()
            assert_live(victim, "two")
        expected = {f"nan-{number}-{when}" for number in range(kills) for when in ("before", "after")}
        told = receiver.of_type
        until(
            lambda: {one.json["data"]["run"] for one in told("alert.firing")} >= expected, within_s=60, why="the alerts"
        )
        sender.stop()
        time.sleep(2)
        ids = {one.headers["webhook-id"]: one.json["data"]["run"] for one in told("alert.firing")}
        assert Counter(run for run in ids.values() if run in expected) == dict.fromkeys(expected, 1)
        fired = servers[0].get("/alerts", limit=1000)["alerts"]
        assert Counter(one["run"] for one in fired if one["rule"] == "nonfinite_loss") == dict.fromkeys(expected, 1)
        stored_once(sender, servers[1])
