"""/ws/live: what is committed arrives, slow pages hurt nobody, a stop is not held up."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_builders import ADMIN, MSGPACK, api, frame, listening, send, services_of
from builders import until
from fastapi.testclient import TestClient
from frames import state
from starlette.testclient import WebSocketDenialResponse, WebSocketTestSession
from starlette.websockets import WebSocketDisconnect
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from perfagent.wire import Alert, encode
from perfagent_server.live import bands
from perfagent_server.live.subscription import Subscription

URL = "ws://127.0.0.1:8420/ws/live"
NAN = float("nan")


@contextlib.contextmanager
def open_page(
    client: TestClient, *, runs: Any = "*", names: Any = "*", key: str = "", **options: Any
) -> Iterator[WebSocketTestSession]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with client.websocket_connect(URL, headers=headers) as page:
        page.send_json({"subscribe": {"runs": runs, "names": names, **options}})
        assert page.receive_json()["subscribed"] is True
        yield page


def receive(page: WebSocketTestSession, key: str) -> Any:
    """The next message with this key."""
    while key not in (message := page.receive_json()):
        pass
    return message[key]


def test_samples_arrive_with_numbers_that_are_none_spelled_out(client: TestClient) -> None:
    with open_page(client) as page:
        send(client, frame({"loss": [1.5, NAN, float("inf")]}))
        (sample,) = receive(page, "samples")
        assert sample == {
            "run": "r1", "rank": 0, "name": "loss", "step": [1, 2, 3],
            "time": [1_700_000_001.0, 1_700_000_002.0, 1_700_000_003.0], "value": [1.5, "NaN", "Infinity"],
        }  # fmt: skip
        alert = receive(page, "alert")
        assert (alert["run"], alert["rule"], alert["since_step"]) == ("r1", "nonfinite_loss", 2)


def watched(client: TestClient, run: str, project: str = "p") -> bool:
    """Whether the agent of a run is told that somebody looks."""
    body = encode(frame({"loss": [1.0]}, run=run, project=project))
    answer = client.post("/api/v1/ingest", content=body, headers=MSGPACK)
    return answer.raise_for_status().headers.get("perfagent-watched") != "0"


@pytest.mark.parametrize("runs", [[], ["r1", "r2"], [f"r{number}" for number in range(1000)]])
def test_a_page_watches_no_run_that_its_viewer_may_not_see(client: TestClient, runs: list[str]) -> None:
    asked = {"scope": "read", "project": "mine"}
    key = client.post("/api/v1/keys", json=asked, headers=ADMIN).raise_for_status().json()["key"]
    with open_page(client, runs=runs, key=key):
        assert watched(client, "r1", "mine")
        assert not watched(client, "r2", "other")
    until(lambda: not watched(client, "r1", "mine"), why="the page was closed")


def test_agents_are_told_whether_a_page_shows_their_run(client: TestClient) -> None:
    assert not watched(client, "r1")
    with open_page(client, runs=["r1"]):
        assert watched(client, "r1")
        assert not watched(client, "r2")
        with open_page(client):
            assert watched(client, "r2")
        with open_page(client, runs=[], fleet=True, names=["loss"]):
            assert not watched(client, "r2"), "a fleet is told once a second, of what agents send anyway"
    until(lambda: not watched(client, "r1"), why="the page was closed")


def test_only_what_was_asked_for_last_arrives(client: TestClient) -> None:
    with open_page(client, runs=["r2"]) as page:
        page.send_json({"subscribe": {"runs": ["r1"], "names": ["loss", "gpu/*"]}})
        assert receive(page, "subscribed") is True
        send(client, frame({"loss": [1.0]}, run="r2"))
        send(client, frame({"loss": [1.0], "lr": [0.1], "gpu/power_w": [300.0]}, run="r1"))
        samples = receive(page, "samples")
        assert {(item["run"], item["name"]) for item in samples} == {("r1", "loss"), ("r1", "gpu/power_w")}


@pytest.fixture
def bands_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the end of the run, and until then for ranks that are still unknown, however slow the machine is."""
    monkeypatch.setattr(bands, "_FIRST_GRACE_S", 3600.0)


@pytest.mark.usefixtures("bands_wait")
def test_bands_put_ranks_together_as_the_catalogue_says(client: TestClient) -> None:
    """And a norm of the parts of all ranks."""
    with open_page(client, runs=["r1"], names=["loss", "tokens_per_s", "grad/norm"], bands=True) as page:
        for rank, parts in enumerate(([9.0, 1.0, 7.0], [16.0, 3.0], [0.0, 0.0])):
            send(client, frame({"grad/local_square_sum": parts}, rank=rank))
            send(client, frame({"loss": [float(rank)] * 4, "tokens_per_s": [10.0] * 4}, rank=rank, seq=2))
        for rank in range(3):
            send(client, frame({}, rank=rank, seq=3, events=[state("finished", time=2.0)]))
        found: dict[str, Any] = {}
        while len(found) < 3:
            found |= {band["name"]: band for band in receive(page, "bands")}
    loss, norm = found["loss"], found["grad/norm"]
    assert (loss["run"], loss["step"], loss["count"]) == ("r1", [1, 2, 3, 4], [3] * 4)
    assert (loss["min"], loss["max"], loss["mean"]) == ([0.0] * 4, [2.0] * 4, [1.0] * 4)
    assert found["tokens_per_s"]["mean"] == [30.0] * 4, "a sum over ranks"
    assert (norm["step"], norm["mean"], norm["nonfinite"]) == ([1, 2], [5.0, 2.0], [0, 0])


def test_fleet_and_run_pages_are_told_until_a_run_is_deleted(client: TestClient) -> None:
    with open_page(client, runs=[], fleet=True, names=["loss"]) as fleet, open_page(client) as page:

        def fleet_tells(**expected: Any) -> dict[str, Any]:
            while not (change := receive(fleet, "fleet").get("r1") or {}).items() >= expected.items():
                pass
            return dict(change)

        def page_tells(name: str, value: str) -> None:
            while receive(page, "run")[name] != value:
                pass

        start = state("starting", time=1.0, name="mine", world_size=1)
        send(client, frame({"loss": [3.0, NAN], "lr": [0.1, 0.1]}, events=[start]))
        first = fleet_tells(name="mine", values={"loss": "NaN"})
        assert (first["step"], first["state"]) == (2, "running") and first["started"] and first["updated"]
        page_tells("name", "mine")
        send(client, frame({"loss": [2.0]}, seq=2, first_step=3))
        assert "name" not in fleet_tells(step=3, values={"loss": 2.0}), "only what has changed"
        client.patch("/api/v1/runs/r1", json={"name": "renamed"}).raise_for_status()
        assert fleet_tells(name="renamed") == {"name": "renamed"}
        page_tells("name", "renamed")
        send(client, frame({}, seq=3, events=[state("finished", time=2.0)]))
        fleet_tells(state="finished")
        page_tells("state", "finished")
        client.delete("/api/v1/runs/r1", headers=ADMIN).raise_for_status()
        while "r1" not in (told := receive(fleet, "fleet")):
            pass
        assert told == {"r1": None}


def test_wrong_subscription_is_answered_and_the_page_lives_on(client: TestClient) -> None:
    with open_page(client) as page:
        for text in (
            "", "no json", "[]", "{}", '{"subscribe": 1}', '{"subscribe": {"runs": [1]}}', "[" * 50_000,
            '{"subscribe": {"runs": "r1"}}', '{"subscribe": {"fleet": true, "runs": ["r1"]}}',
            '{"subscribe": {"fleet": true, "names": ["gpu/*"]}}',
        ):  # fmt: skip
            page.send_text(text)
            assert receive(page, "error")["code"] == "bad_request", text
        send(client, frame({"loss": [1.0]}))
        assert receive(page, "samples")


def test_a_page_gets_at_most_ten_messages_of_samples_a_second(client: TestClient) -> None:
    with open_page(client, runs=["r1"]) as page:
        began, steps, messages = time.monotonic(), list[int](), 0
        for seq in range(1, 61):
            send(client, frame({"loss": [1.0]}, seq=seq, first_step=seq))
        while len(steps) < 60:
            (sample,) = receive(page, "samples")
            steps += sample["step"]
            messages += 1
        took = time.monotonic() - began
        assert steps == list(range(1, 61)), "coalesced, and nothing left out"
        assert messages <= 10 * took + 2


@pytest.mark.fault
@pytest.mark.parametrize(
    "origin", ["http://evil.example", "http://localhost:1", "null", "https://127.0.0.1.evil.example"]
)
def test_x07_another_sites_page_gets_no_socket(client: TestClient, origin: str) -> None:
    with pytest.raises(WebSocketDenialResponse) as refused, client.websocket_connect(URL, headers={"Origin": origin}):
        pass
    assert refused.value.status_code == 403
    with client.websocket_connect(URL, headers={"Origin": "http://127.0.0.1:8420"}):
        pass


def test_a_page_ends_with_its_key_and_others_go_on(tmp_path: Path) -> None:
    with api(tmp_path, auth="required") as client:
        keys = [client.post("/api/v1/keys", json={"scope": "read"}, headers=ADMIN).json() for _ in range(2)]
        with open_page(client, key=keys[0]["key"]) as first, open_page(client, key=keys[1]["key"]) as second:
            assert client.delete(f"/api/v1/keys/{keys[0]['id']}", headers=ADMIN).status_code == 204
            with pytest.raises(WebSocketDisconnect) as closed:
                first.receive_json()
            assert closed.value.code == 1008
            services_of(client).hub.publish_alert(
                Alert(id="a", state="firing", run="r1", rule="x", severity="info", message="", since="")
            )
            assert receive(second, "alert")["id"] == "a"
            until(lambda: services_of(client).hub.counters["pages"] == 1)
            assert services_of(client).access.failures.total == 0, "no failed attempt was counted"


@pytest.mark.real
@pytest.mark.fault
@pytest.mark.long
def test_s07_page_that_does_not_read_lags_and_ingest_goes_on(tmp_path: Path) -> None:
    with (
        listening(tmp_path) as server,
        connect(f"ws://127.0.0.1:{server.settings.port}/ws/live", max_size=None, max_queue=1) as sleeper,
        httpx.Client(base_url=server.url, trust_env=False) as client,
    ):
        hub = server.app.state.services.hub
        sleeper.send(json.dumps({"subscribe": {"runs": [], "names": []}}))
        until(lambda: hub.has_pages)
        rows, end = 2000, time.monotonic() + 60
        for seq in range(1, 100_000):
            columns = {f"metric/{number}": [1.0 / 3.0] * rows for number in range(10)}
            body = encode(frame(columns, seq=seq, first_step=seq * rows))
            client.post("/api/v1/ingest", content=body, headers=MSGPACK).raise_for_status()
            if hub.counters["lagged"]:
                break
            assert time.monotonic() < end, "the sleeping page was never found to lag"
        (page,) = hub._pages
        assert page.bytes <= 2 * 2**20
        while json.loads(sleeper.recv(timeout=20)) != {"lagged": True}:  # now it reads: what had piled up is gone
            pass


@pytest.mark.real
@pytest.mark.fault
def test_s07_a_stop_with_open_pages_takes_less_than_ten_seconds(tmp_path: Path) -> None:
    with listening(tmp_path) as server, contextlib.ExitStack() as stack:
        address = f"ws://127.0.0.1:{server.settings.port}/ws/live"
        pages = [stack.enter_context(connect(address)) for _ in range(5)]
        for page in pages:
            page.send(json.dumps({"subscribe": {}}))
            assert json.loads(page.recv(timeout=20))["subscribed"] is True
        began = time.monotonic()
        server.stop()
        assert time.monotonic() - began < 10
        for page in pages:
            with pytest.raises(ConnectionClosed):
                while True:
                    page.recv(timeout=5)


def test_subscriptions_say_what_they_want() -> None:
    wanted = Subscription.from_message({"subscribe": {"runs": ["a"], "names": ["loss", "phase/*"]}})
    assert wanted.wants_run("a") and not wanted.wants_run("b")
    assert wanted.wants_name("loss") and wanted.wants_name("phase/data_s") and not wanted.wants_name("phases")
    layer = "grad_norm/blocks.0.weight"  # layers are told only to who asks for them
    assert not Subscription.from_message({"subscribe": {}}).wants_name(layer)
    assert Subscription.from_message({"subscribe": {"names": ["grad_norm/*"]}}).wants_name(layer)
