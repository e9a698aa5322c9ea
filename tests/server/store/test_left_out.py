"""Names and tags for which a run has no room cost nothing of its own, and are counted and shown."""

from __future__ import annotations

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


@pytest.fixture
def client(tmp_path: Path) -> Any:
    with api(tmp_path, max_names=LIMIT) as running:
        yield running


def many(count: int, first: int = 0) -> dict[str, list[float]]:
    return {f"user/{number}": [1.0] for number in range(first, first + count)}


def left_out(client: TestClient, run: str = "r1") -> Any:
    return client.get(f"/api/v1/runs/{run}").json()["left_out"]


@pytest.mark.fault
def test_a_nan_behind_more_names_than_a_run_may_have_is_an_alert(client: TestClient) -> None:
    answer = send(client, frame(many(5 * LIMIT)))
    assert answer["stored"] == LIMIT and len(answer["rejected"]) == 4 * LIMIT
    own = {"loss": [float("nan")], "lr": [0.1], "step_time_s": [0.2], "phase/data_s": [0.1], "agent/dropped": [4.0]}
    own |= {"grad_norm/layer": [1.0], "val/loss": [2.0]}
    assert send(client, frame(own, seq=2, first_step=2))["rejected"] == []
    until(lambda: [one["rule"] for one in client.get("/api/v1/alerts").json()["alerts"]] == ["nonfinite_loss"])
    assert client.get("/api/v1/runs/r1/latest").json().keys() >= own.keys()


def test_the_run_says_how_many_names_it_has_no_room_for(client: TestClient) -> None:
    send(client, frame(many(LIMIT)))
    assert left_out(client) == {}
    send(client, frame(many(LIMIT + 7), seq=2, first_step=2))
    send(client, frame(many(LIMIT + 7), seq=3, first_step=3, rank=1, source="other"))
    assert left_out(client) == {"names": {"count": 7, "limit": LIMIT}}
    send(client, frame(many(3, first=1000), seq=4, first_step=4))
    assert left_out(client) == {"names": {"count": 10, "limit": LIMIT}}


def test_a_restart_counts_no_name_twice(tmp_path: Path) -> None:
    for seq in (1, 2):
        with api(tmp_path, max_names=LIMIT) as client:
            send(client, frame(many(LIMIT + 7), seq=seq, first_step=seq))
            assert left_out(client) == {"names": {"count": 7, "limit": LIMIT}}


def told_by_the_agent(client: TestClient, run: str, **data: Any) -> Any:
    told = Event(kind="left_out", time=1.0, data={"limit": 2000, "names": ["a", "b"], **data})
    assert send(client, frame({"loss": [1.0]}, run=run, source=run, events=[told]))["rejected"] == []
    return left_out(client, run)


def test_the_run_says_how_many_names_its_agent_left_out(client: TestClient) -> None:
    assert told_by_the_agent(client, "old") == {"names": {"count": 2, "limit": 2000}}, "an agent that named the first"
    exact = {"names": {"count": 1234, "limit": 2000, "exact": 1}}
    assert told_by_the_agent(client, "new", count=1234) == exact
    most = {"names": {"count": MOST_LEFT_OUT, "limit": 2000}}
    assert told_by_the_agent(client, "many", count=MOST_LEFT_OUT) == most, "it counts no further"


def test_counts_of_several_ranks_are_not_called_exact(client: TestClient) -> None:
    told = Event(kind="left_out", time=1.0, data={"limit": 2000, "names": ["a"], "count": 3})
    send(client, frame({"loss": [1.0]}, events=[state("starting", world_size=2), told]))
    assert left_out(client) == {"names": {"count": 3, "limit": 2000}}


def test_the_run_says_how_many_tags_it_has_no_room_for(client: TestClient) -> None:
    tags = [f"tag {number}" for number in range(103)]
    for seq in (1, 2):
        sent = frame({"loss": [1.0]}, seq=seq, first_step=seq, events=[state("starting", tags=tags)])
        assert send(client, sent)["rejected"] == []
    run = client.get("/api/v1/runs/r1").json()
    assert (len(run["tags"]), run["left_out"]) == (100, {"tags": {"count": 3, "limit": 100}})


def test_show_says_what_was_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with listening(tmp_path, max_names=LIMIT) as server:
        monkeypatch.setenv("PERFAGENT_SERVER", server.url)
        body = encode(frame(many(LIMIT + 1234)))
        web().post(f"{server.url}/api/v1/ingest", content=body, headers=MSGPACK).raise_for_status()
        shown = command(capsys, "show", "r1").out
        told = Event(kind="left_out", time=1.0, data={"limit": 2000, "names": ["a"], "count": 1234})
        body = encode(frame({"loss": [1.0]}, run="r2", source="r2", events=[told]))
        web().post(f"{server.url}/api/v1/ingest", content=body, headers=MSGPACK).raise_for_status()
        assert "1,234 metric names of this run were left out: the limit is 2,000" in command(capsys, "show", "r2").out
    assert f"1,234 metric names of this run, or more, were left out: the limit is {LIMIT}" in shown
