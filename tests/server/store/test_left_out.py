"""Names and tags for which a run has no room cost nothing of its own, and are counted and shown."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from api_builders import MSGPACK, api, frame, listening, send
from builders import until, web
from command_line import command
from fastapi.testclient import TestClient
from frames import state

from perfagent.wire import Event, encode
from perfagent.wire.limits import MOST_LEFT_OUT

LIMIT = 50


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    with api(tmp_path_factory.mktemp("left-out"), max_names=LIMIT) as running:
        yield running


def many(count: int, first: int = 0) -> dict[str, list[float]]:
    return {f"user/{number}": [1.0] for number in range(first, first + count)}


def left_out(client: TestClient, run: str) -> Any:
    return client.get(f"/api/v1/runs/{run}").json()["left_out"]


def by_the_agent(**data: Any) -> Event:
    return Event(kind="left_out", time=1.0, data={"limit": 2000, "names": ["a", "b"], **data})


@pytest.mark.fault
def test_a_nan_behind_more_names_than_a_run_may_have_is_told(client: TestClient) -> None:
    answer = send(client, frame(many(5 * LIMIT), run="nan"))
    assert (answer["stored"], len(answer["rejected"])) == (LIMIT, 4 * LIMIT)
    own = {"loss": [float("nan")], "lr": [0.1], "step_time_s": [0.2], "phase/data_s": [0.1], "agent/dropped": [4.0]}
    own |= {"grad_norm/layer": [1.0], "val/loss": [2.0]}
    assert send(client, frame(own, run="nan", seq=2, first_step=2))["rejected"] == []
    until(lambda: [one["rule"] for one in client.get("/api/v1/alerts").json()["alerts"]] == ["nonfinite_loss"])
    assert client.get("/api/v1/runs/nan/latest").json().keys() >= own.keys()


def test_the_server_counts_the_names_it_has_no_room_for(tmp_path: Path) -> None:
    room_for_all, too_many = many(LIMIT), many(LIMIT + 7)
    with api(tmp_path, max_names=LIMIT) as client:
        send(client, frame(room_for_all))
        assert left_out(client, "r1") == {}
        send(client, frame(too_many, seq=2, first_step=2))
        send(client, frame(too_many, rank=1))
        assert left_out(client, "r1") == {"names": {"count": 7, "limit": LIMIT}}
    with api(tmp_path, max_names=LIMIT) as client:  # a restart counts no name twice
        send(client, frame(too_many, seq=3, first_step=3))
        assert left_out(client, "r1") == {"names": {"count": 7, "limit": LIMIT}}
        send(client, frame(many(3, first=1000), seq=4, first_step=4))
        assert left_out(client, "r1") == {"names": {"count": 10, "limit": LIMIT}}


@pytest.mark.parametrize(
    ("told", "count", "exact"),
    [
        ([by_the_agent()], 2, {}),  # an agent that named the first
        ([by_the_agent(count=1234)], 1234, {"exact": 1}),
        ([by_the_agent(count=MOST_LEFT_OUT)], MOST_LEFT_OUT, {}),  # it counts no further
        ([state("starting", world_size=2), by_the_agent(count=3)], 3, {}),  # one of several ranks
    ],
)
def test_the_agent_says_how_many_names_it_left_out(client: TestClient, told: list[Event], count: int, exact) -> None:
    run = f"agent{len(told)}{count}"
    assert send(client, frame({"loss": [1.0]}, run=run, events=told))["rejected"] == []
    assert left_out(client, run) == {"names": {"count": count, "limit": 2000, **exact}}


def test_tags_without_room_are_counted_once(client: TestClient) -> None:
    tags = [f"tag {number}" for number in range(103)]
    for seq in (1, 2):
        sent = frame({"loss": [1.0]}, run="tags", seq=seq, first_step=seq, events=[state("starting", tags=tags)])
        assert send(client, sent)["rejected"] == []
    run = client.get("/api/v1/runs/tags").json()
    assert (len(run["tags"]), run["left_out"]) == (100, {"tags": {"count": 3, "limit": 100}})


@pytest.mark.real
def test_show_says_what_was_left_out(tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    by_agent = frame({"loss": [1.0]}, run="r2", events=[by_the_agent(count=1234)])
    with listening(tmp_path, max_names=LIMIT) as server:
        monkeypatch.setenv("PERFAGENT_SERVER", server.url)
        for sent in (frame(many(LIMIT + 1234)), by_agent):
            web().post(f"{server.url}/api/v1/ingest", content=encode(sent), headers=MSGPACK).raise_for_status()
        of_server, of_agent = (command(capsys, "show", run).out for run in ("r1", "r2"))
    assert "1,234 metric names" in of_server and "or more" in of_server and str(LIMIT) in of_server
    assert "1,234 metric names" in of_agent and "or more" not in of_agent and "2,000" in of_agent
