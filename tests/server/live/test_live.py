"""/ws/live over a real socket: what is committed arrives, slow pages hurt nobody, a stop is not held up."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from api_builders import ADMIN, MSGPACK, Listening, frame, listening
from builders import until, web
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from perfagent.wire import Alert, Event, Frame, Group, encode
from perfagent_server.live import bands
from perfagent_server.live.bands import over_ranks
from perfagent_server.live.subscription import Subscription
from perfagent_server.store.stored import Stored


@contextlib.contextmanager
def open_page(
    server: Listening, *, runs: list[str] | str = "*", names: list[str] | str = "*", key: str = "", **options: Any
) -> Iterator[ClientConnection]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with connect(f"ws://127.0.0.1:{server.settings.port}/ws/live", max_size=None, additional_headers=headers) as socket:
        socket.send(json.dumps({"subscribe": {"runs": runs, "names": names, **options}}))
        assert json.loads(socket.recv(timeout=10)) == {"subscribed": True}
        yield socket


def post(server: Listening, sent: Frame) -> None:
    answer = web().post(f"{server.url}/api/v1/ingest", content=encode(sent), headers=MSGPACK)
    assert answer.status_code == 200, answer.text


def receive(socket: ClientConnection, key: str, *, within_s: float = 20.0) -> Any:
    """The next message with this key."""
    end = time.monotonic() + within_s
    while True:
        message = json.loads(socket.recv(timeout=max(end - time.monotonic(), 0.001)))
        if key in message:
            return message[key]


def test_samples_arrive_with_numbers_that_are_none_spelled_out(tmp_path: Path) -> None:
    with listening(tmp_path) as server, open_page(server) as page:
        post(server, frame({"loss": [1.5, float("nan"), float("inf")]}))
        (sample,) = receive(page, "samples")
        assert sample == {
            "run": "r1", "rank": 0, "name": "loss", "step": [1, 2, 3],
            "time": [1_700_000_001.0, 1_700_000_002.0, 1_700_000_003.0], "value": [1.5, "NaN", "Infinity"],
        }  # fmt: skip


def watched(server: Listening, run: str, project: str = "p") -> bool:
    body = encode(frame({"loss": [1.0]}, run=run, project=project))
    answer = web().post(f"{server.url}/api/v1/ingest", content=body, headers=MSGPACK)
    return answer.raise_for_status().headers.get("perfagent-watched") != "0"


@pytest.mark.parametrize("runs", [[], ["r1", "r2"], [f"r{number}" for number in range(1000)]])
def test_a_page_watches_no_run_that_its_viewer_may_not_see(tmp_path: Path, runs: list[str]) -> None:
    with listening(tmp_path) as server:
        asked = {"scope": "read", "project": "mine"}
        key = web().post(f"{server.url}/api/v1/keys", json=asked, headers=ADMIN).raise_for_status().json()["key"]
        with open_page(server, runs=runs, key=key):
            assert watched(server, "r1", "mine")
            assert not watched(server, "r2", "other")
        until(lambda: not watched(server, "r1", "mine"), why="the page was closed")


def test_agents_are_told_whether_a_page_shows_their_run(tmp_path: Path) -> None:
    with listening(tmp_path) as server:
        assert not watched(server, "r1")
        with open_page(server, runs=["r1"]):
            assert watched(server, "r1")
            assert not watched(server, "r2")
            with open_page(server):
                assert watched(server, "r2")
            with open_page(server, runs=[], fleet=True, names=["loss"]):
                assert not watched(server, "r2"), "a fleet is told once a second, of what agents send anyway"
        until(lambda: not watched(server, "r1"), why="the page was closed")


@pytest.mark.parametrize("everything", [[], "*", ["*"]])
def test_an_empty_list_and_a_star_are_all(tmp_path: Path, everything: Any) -> None:
    with listening(tmp_path) as server, open_page(server, runs=everything, names=everything) as page:
        post(server, frame({"loss": [1.0]}, run="other"))
        assert receive(page, "samples")[0]["run"] == "other"


def test_only_what_was_asked_for_arrives(tmp_path: Path) -> None:
    with listening(tmp_path) as server, open_page(server, runs=["r1"], names=["loss", "gpu/*"]) as page:
        post(server, frame({"loss": [1.0]}, run="r2"))
        post(server, frame({"loss": [1.0], "lr": [0.1], "gpu/power_w": [300.0]}, run="r1"))
        samples = receive(page, "samples")
        assert {(item["run"], item["name"]) for item in samples} == {("r1", "loss"), ("r1", "gpu/power_w")}


def test_a_new_subscription_replaces_the_old_one(tmp_path: Path) -> None:
    with listening(tmp_path) as server, open_page(server, runs=["r1"]) as page:
        page.send(json.dumps({"subscribe": {"runs": ["r2"], "names": []}}))
        assert receive(page, "subscribed") is True
        post(server, frame({"loss": [1.0]}, run="r1"))
        post(server, frame({"loss": [2.0]}, run="r2"))
        assert receive(page, "samples")[0]["run"] == "r2"


@pytest.fixture
def bands_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the end of the run, and until then for ranks that are still unknown, however slow the machine is."""
    monkeypatch.setattr(bands, "_FIRST_GRACE_S", 3600.0)


ENDED = Event(kind="state", time=2.0, data={"state": "finished"})


@pytest.mark.usefixtures("bands_wait")
def test_bands_put_ranks_together_as_the_catalogue_says(tmp_path: Path) -> None:
    with (
        listening(tmp_path) as server,
        open_page(server, runs=["r1"], names=["loss", "tokens_per_s"], bands=True) as page,
    ):
        for rank in range(3):
            post(server, frame({"loss": [float(rank)] * 4, "tokens_per_s": [10.0] * 4}, rank=rank))
        for rank in range(3):
            post(server, frame({}, rank=rank, seq=2, events=[ENDED]))
        found: dict[str, Any] = {}
        until(lambda: found.update({band["name"]: band for band in receive(page, "bands")}) or len(found) == 2)
        loss, tokens = found["loss"], found["tokens_per_s"]
        assert (loss["run"], loss["step"]) == ("r1", [1, 2, 3, 4])
        assert (loss["min"], loss["max"], loss["mean"]) == ([0.0] * 4, [2.0] * 4, [1.0] * 4)
        assert tokens["mean"] == [30.0] * 4  # a sum over ranks
        assert loss["count"] == [3] * 4


def test_bands_of_one_step_with_a_number_that_is_none() -> None:
    steps = np.array([1, 1, 2, 2], np.int64)
    band = over_ranks("loss", steps, steps.astype(np.float64), np.array([1.0, np.nan, np.inf, np.nan]))
    assert (band["mean"], band["nonfinite"], band["count"]) == ([1.0, "NaN"], [1, 2], [2, 2])


@pytest.mark.usefixtures("bands_wait")
def test_the_band_of_a_norm_is_made_of_the_parts_of_all_ranks(tmp_path: Path) -> None:
    with listening(tmp_path) as server, open_page(server, names=["grad/norm"], bands=True) as page:
        for rank, parts in enumerate(([9.0, 1.0, 7.0], [16.0, 3.0])):
            post(server, frame({"grad/local_square_sum": parts}, rank=rank))
        for rank in range(2):
            post(server, frame({}, rank=rank, seq=2, events=[ENDED]))
        (band,) = receive(page, "bands")
        assert (band["name"], band["step"], band["mean"], band["nonfinite"]) == (
            "grad/norm",
            [1, 2],
            [5.0, 2.0],
            [0, 0],
        )


def test_layers_are_told_only_to_who_asks_for_them() -> None:
    assert not Subscription.from_message({"subscribe": {}}).wants_name("grad_norm/blocks.0.weight")
    assert Subscription.from_message({"subscribe": {"names": ["grad_norm/*"]}}).wants_name("grad_norm/blocks.0.weight")


def test_runs_are_told_of_as_they_change(tmp_path: Path) -> None:
    with listening(tmp_path) as server, open_page(server) as page:
        start = Event(kind="state", time=1.0, data={"state": "starting", "name": "mine", "world_size": 1})
        post(server, frame({"loss": [1.0]}, events=[start]))
        run = receive(page, "run")
        assert (run["run"], run["name"]) == ("r1", "mine")
        post(server, frame({}, seq=2, events=[Event(kind="state", time=2.0, data={"state": "finished"})]))
        until(lambda: receive(page, "run")["state"] == "finished")
        web().patch(f"{server.url}/api/v1/runs/r1", json={"name": "renamed"}).raise_for_status()
        until(lambda: receive(page, "run")["name"] == "renamed")


def test_a_fleet_is_told_of_every_run_until_it_is_deleted(tmp_path: Path) -> None:
    with listening(tmp_path) as server, open_page(server, runs=[], fleet=True, names=["loss"]) as page:

        def fleet_tells(run: str, **expected: Any) -> dict[str, Any]:
            return until(
                lambda: (change := receive(page, "fleet").get(run)) and change.items() >= expected.items() and change
            )

        start = Event(kind="state", time=1.0, data={"state": "starting", "name": "mine", "world_size": 1})
        post(server, frame({"loss": [3.0, float("nan")], "lr": [0.1, 0.1]}, events=[start]))
        first = fleet_tells("r1", name="mine", values={"loss": "NaN"})
        assert (first["step"], first["state"]) == (2, "running") and first["started"] and first["updated"]
        post(server, frame({"loss": [2.0]}, seq=2, first_step=3))
        second = fleet_tells("r1", step=3, values={"loss": 2.0})
        assert "name" not in second, "only what has changed"
        web().patch(f"{server.url}/api/v1/runs/r1", json={"name": "renamed"}).raise_for_status()
        assert fleet_tells("r1", name="renamed") == {"name": "renamed"}
        post(server, frame({}, seq=3, events=[Event(kind="state", time=2.0, data={"state": "finished"})]))
        fleet_tells("r1", state="finished")
        web().delete(f"{server.url}/api/v1/runs/r1", headers=ADMIN).raise_for_status()
        assert until(lambda: "r1" in (told := receive(page, "fleet")) and told) == {"r1": None}


def test_an_alert_arrives(tmp_path: Path) -> None:
    with listening(tmp_path) as server, open_page(server) as page:
        post(server, frame({"loss": [1.0, float("nan")]}))
        alert = receive(page, "alert")
        assert (alert["run"], alert["rule"], alert["since_step"]) == ("r1", "nonfinite_loss", 2)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no json",
        "[]",
        "{}",
        '{"subscribe": 1}',
        '{"subscribe": {"runs": [1]}}',
        "[" * 50_000,
        '{"subscribe": {"runs": "r1"}}',
        '{"subscribe": {"fleet": true, "runs": ["r1"]}}',
        '{"subscribe": {"fleet": true, "names": ["gpu/*"]}}',
    ],
)
def test_a_message_that_is_no_subscription_is_answered_and_the_page_lives_on(tmp_path: Path, text: str) -> None:
    with listening(tmp_path) as server, open_page(server) as page:
        page.send(text)
        assert receive(page, "error")["code"] == "bad_request"
        post(server, frame({"loss": [1.0]}))
        assert receive(page, "samples")


def test_a_page_gets_at_most_ten_messages_of_samples_a_second(tmp_path: Path) -> None:
    with listening(tmp_path) as server, open_page(server, runs=["r1"]) as page:
        began = time.monotonic()
        with httpx.Client(trust_env=False) as client:
            for seq in range(1, 61):
                body = encode(frame({"loss": [1.0]}, seq=seq, first_step=seq))
                client.post(f"{server.url}/api/v1/ingest", content=body, headers=MSGPACK).raise_for_status()
        steps: list[int] = []
        messages = 0
        while len(steps) < 60:
            (sample,) = receive(page, "samples")
            steps += sample["step"]
            messages += 1
        took = time.monotonic() - began
        assert steps == list(range(1, 61)), "coalesced, and nothing left out"
        assert messages <= 10 * took + 2


@pytest.mark.fault
@pytest.mark.long
def test_s07_a_page_that_does_not_read_is_told_that_it_lags_and_ingest_goes_on(tmp_path: Path) -> None:
    address = "ws://127.0.0.1:{}/ws/live"
    with (
        listening(tmp_path) as server,
        connect(address.format(server.settings.port), max_size=None, max_queue=1) as sleeper,
    ):
        hub = server.app.state.services.hub
        sleeper.send(json.dumps({"subscribe": {"runs": [], "names": []}}))
        until(lambda: hub._topics)
        rows = 2000
        with httpx.Client(trust_env=False) as client:

            def flood(seq: list[int]) -> bool:
                seq[0] += 1
                columns = {f"metric/{number}": [1.0 / 3.0] * rows for number in range(10)}
                body = encode(frame(columns, seq=seq[0], first_step=seq[0] * rows))
                client.post(f"{server.url}/api/v1/ingest", content=body, headers=MSGPACK).raise_for_status()
                return bool(hub.counters["lagged"])

            counter = [0]
            until(lambda: flood(counter), within_s=60, every_s=0.1, why="the sleeping page was never found to lag")
        (page,) = hub._pages
        assert page.bytes <= 2 * 2**20
        seen = False
        while not seen:  # now it reads: what had piled up is gone, and it is told
            seen = json.loads(sleeper.recv(timeout=20)) == {"lagged": True}


@pytest.mark.fault
def test_s07_publishing_without_pages_keeps_nothing(tmp_path: Path) -> None:
    with listening(tmp_path) as server:
        hub = server.app.state.services.hub
        post(server, frame({"loss": [1.0]}))
        assert not hub._inbox
        with open_page(server):
            until(lambda: hub.counters["pages"] == 1)
        until(lambda: hub.counters["pages"] == 0)
        assert not hub._topics


def test_publishing_never_raises(tmp_path: Path) -> None:
    with listening(tmp_path) as server, open_page(server) as page:
        hub = server.app.state.services.hub
        odd = Group(step=[1], time=[1.0], monotonic=[1.0], values={"x": [1.0]})
        odd.values["x"] = b"123"  # no whole number of items
        hub.publish(
            [Stored(id=1, run="r1", attempt=1, rank=0, source="s", seq=1, received=1.0, groups=[odd], events=[])]
        )
        assert receive(page, "lagged") is True
        odd_alert = Alert(
            id="a", state="firing", run="r1", rule="x", severity="info", message="", since="", evidence={"x": object()}
        )
        hub.publish_alert(odd_alert)
        post(server, frame({"loss": [1.0]}))
        assert receive(page, "samples")
        assert hub.counters["errors"] == 2


@pytest.mark.fault
@pytest.mark.parametrize(
    "origin", ["http://evil.example", "http://localhost:1", "null", "https://127.0.0.1.evil.example"]
)
def test_x07_another_sites_page_gets_no_socket(tmp_path: Path, origin: str) -> None:
    with listening(tmp_path) as server:
        with (
            pytest.raises(InvalidStatus) as refused,
            connect(f"ws://127.0.0.1:{server.settings.port}/ws/live", origin=origin),
        ):
            pass
        assert refused.value.response.status_code == 403
        with connect(f"ws://127.0.0.1:{server.settings.port}/ws/live", origin=server.url):
            pass


def test_a_page_ends_with_its_key_and_others_go_on(tmp_path: Path) -> None:
    with listening(tmp_path, auth="required") as server, contextlib.ExitStack() as stack:
        address = f"ws://127.0.0.1:{server.settings.port}/ws/live"
        keys, pages = [], []
        with httpx.Client(base_url=f"{server.url}/api/v1", headers=ADMIN, trust_env=False) as admin:
            for _ in range(2):
                keys.append(admin.post("/keys", json={"scope": "read"}).json())
                page = stack.enter_context(
                    connect(address, additional_headers={"Authorization": f"Bearer {keys[-1]['key']}"})
                )
                page.send(json.dumps({"subscribe": {}}))
                assert receive(page, "subscribed") is True
                pages.append(page)
            assert admin.delete(f"/keys/{keys[0]['id']}").status_code == 204
            with pytest.raises(ConnectionClosed) as closed:
                pages[0].recv(timeout=10)
            assert closed.value.rcvd is not None and closed.value.rcvd.code == 1008
            server.app.state.services.hub.publish_alert(
                Alert(id="a", state="firing", run="r1", rule="x", severity="info", message="", since="")
            )
            assert receive(pages[1], "alert")["id"] == "a"
            assert admin.get("/runs").status_code == 200, "no failed attempt was counted"
        until(lambda: server.app.state.services.hub.counters["pages"] == 1)
        assert server.app.state.services.access.failures.total == 0


@pytest.mark.fault
def test_s07_a_stop_with_open_pages_takes_less_than_ten_seconds(tmp_path: Path) -> None:
    with listening(tmp_path) as server, contextlib.ExitStack() as stack:
        pages = [stack.enter_context(open_page(server)) for _ in range(5)]
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
