"""Names and tags for which a run has no room cost nothing of its own, and are counted and shown."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from api_builders import api, frame, send
from builders import until
from fastapi.testclient import TestClient
from frames import state

from perfagent.wire import Event
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
    too_many = many(LIMIT + 7)
    with api(tmp_path, max_names=LIMIT) as client:
        send(client, frame(many(LIMIT)))
        assert left_out(client, "r1") == {}
        send(client, frame(too_many, seq=2, first_step=2))
        send(client, frame(too_many, rank=1))
        assert left_out(client, "r1") == {"names": {"count": 7, "limit": LIMIT}}
    with api(tmp_path, max_names=LIMIT) as client:  # a restart counts no name twice
        send(client, frame(too_many | many(3, first=1000), seq=3, first_step=3))
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
