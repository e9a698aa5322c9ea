"""Alerts that have their run profiled: where the project's rules say so, once each, and seldom."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from api_builders import ADMIN, api, frame, send, services_of
from builders import until
from clocks import Clock
from fastapi.testclient import TestClient
from frames import state

from perfagent.errors import WireError
from perfagent.wire import Event, Finding
from perfagent_server.runs.rule_profiles import MOST, PAUSE_S

NOTHING = {"asked": 0, "held_back": 0}


@pytest.fixture
def clock() -> Clock:
    return Clock(1_790_000_000.0)


@pytest.fixture
def client(tmp_path: Path, clock: Clock) -> Iterator[TestClient]:
    with api(tmp_path, clocks={"clock": clock}) as running:
        yield running


def start(client: TestClient, *, on: tuple[str, ...] = ("data_bound", "comm_bound")) -> None:
    for rule in on:
        client.put(f"/api/v1/rules/{rule}", json={"profile": True}, headers=ADMIN).raise_for_status()
    for rank in (0, 1):
        send(client, frame({"loss": [1.0]}, rank=rank, events=[state("starting", world_size=2)]))


def fire(client: TestClient, rule: str, seq: int, **data: Any) -> dict[str, Any]:
    """An alert of this rule, as a program that judges by itself reports it; once everything that it causes is done."""
    said = {"rule": rule, "severity": "warning", "message": f"{rule} says so.", "since_step": 1, **data}
    event = Event(kind="finding", time=1.0, step=1, data=said)
    send(client, frame({"loss": [1.0]}, seq=seq, first_step=seq, events=[event]))
    found = until(lambda: [one for one in client.get("/api/v1/runs/r1/alerts").json()["alerts"] if one["rule"] == rule])
    services_of(client).engine.run_once()  # waits for the round that fired it
    services_of(client).database.write(lambda _: None)
    return dict(found[0])


def orders(client: TestClient) -> list[dict[str, Any]]:
    return list(client.get("/api/v1/runs/r1/commands").json()["commands"])


def counted(client: TestClient) -> dict[str, int]:
    return dict(client.get("/api/v1/self", headers=ADMIN).json()["counters"]["rule_profiles"])


def asked(client: TestClient, alert: str) -> Any:
    """What comes of one more firing of an alert; None where nothing is asked."""
    finding = Finding(rule="data_bound", severity="warning", message="m", since_step=3)
    future = services_of(client).rule_profiles.fired("r1", alert, finding)
    assert isinstance(future, Future)
    return future.result(10)


def test_an_alert_has_the_first_of_its_ranks_profiled_once(client: TestClient) -> None:
    start(client)
    alert = fire(client, "comm_bound", 2, ranks=[1, 0], message="Rank 1 is slow.")
    fire(client, "data_bound", 3)  # soon after: it is held back
    (order,) = orders(client)
    assert (order["kind"], order["ranks"], order["who"]) == ("profile", [1], "rule comm_bound")
    assert (order["rule"], order["alert"], order["why"]) == ("comm_bound", alert["id"], "Rank 1 is slow.")
    (handed,) = send(client, frame({}, rank=1, seq=2))["commands"]
    assert handed["params"] == {"steps": 5, "rule": "comm_bound", "since_step": 1}
    assert counted(client) == {"asked": 1, "held_back": 1}


def test_without_the_switch_nothing_is_asked_or_counted(client: TestClient) -> None:
    start(client, on=("comm_bound",))
    fire(client, "data_bound", 2)
    assert (orders(client), counted(client)) == ([], NOTHING)
    for project, ranks in (("elsewhere", None), ("p", [0])):
        client.put("/api/v1/rules/data_bound", params={"project": project}, json={"profile": True}, headers=ADMIN)
        order = asked(client, "al_1")
        assert (order and order.ranks) == ranks, "rank 0 where the alert names none"


def test_after_the_pause_another_is_taken_up_to_the_most(client: TestClient, clock: Clock) -> None:
    start(client)
    client.post("/api/v1/runs/r1/commands", json={"kind": "profile"}).raise_for_status()  # by hand: it counts nowhere
    for number in range(MOST):
        assert asked(client, f"al_{number}") is not None
        clock.at += PAUSE_S - 1
        assert asked(client, f"al_{number}_soon") is None
        clock.at += 1
        for rank in (0, 1):  # a sign of life
            send(client, frame({}, rank=rank, seq=2 + number))
    assert asked(client, "al_more") is None
    assert counted(client) == {"asked": MOST, "held_back": MOST + 1}
    assert sorted(one["rule"] for one in orders(client)) == ["", *["data_bound"] * MOST]


def test_a_run_that_has_ended_or_is_silent_is_not_profiled(client: TestClient, clock: Clock) -> None:
    clock.at += 3600
    start(client)
    clock.at += 61
    with pytest.raises(WireError, match="rank 0 is silent"):
        asked(client, "al_1")
    for rank in (0, 1):
        send(client, frame({}, rank=rank, seq=2, events=[state("finished")]))
    with pytest.raises(WireError, match=r"has ended \(finished\)"):
        asked(client, "al_1")
    assert (orders(client), counted(client)) == ([], NOTHING)


@pytest.mark.sql
def test_a_profile_and_its_alert_name_each_other(client: TestClient) -> None:
    start(client)
    alert = fire(client, "data_bound", 2)
    (order,) = orders(client)
    about = {"first_step": 3, "last_step": 7, "says": ["It waits."], "shares": {"steps_s": 1}}
    summary = {"profile": "ab12", "command": order["id"], **about, "parts": 1}
    piece = {"profile": "ab12", "part": 1, "parts": 1, "payload": b"x"}
    by_hand = {"profile": "cd34", "command": "cm_unknown", **about, "parts": 0}
    events = [Event(kind="profile", time=1.0, step=7, data=data) for data in (summary, piece, by_hand)]
    send(client, frame({}, seq=3, events=events))
    listed = {one["id"]: one for one in client.get("/api/v1/runs/r1/profiles").json()["profiles"]}
    told = [listed["ab12"][name] for name in ("alert", "rule", "who", "says")]
    assert told == [alert["id"], "data_bound", "rule data_bound", ["It waits."]]
    url = listed["ab12"]["url"]
    assert client.get(url).content == b"x"
    assert [listed["cd34"][name] for name in ("alert", "rule", "url")] == ["", "", ""]
    shown = client.get(f"/api/v1/alerts/{alert['id']}").json()
    assert [(one["id"], one["url"]) for one in shown["profiles"]] == [("ab12", url)]
