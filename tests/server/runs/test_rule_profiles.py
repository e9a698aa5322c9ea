"""Alerts that have their run profiled: where the project's rules say so, once each, and seldom."""

from __future__ import annotations

import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from api_builders import ADMIN, api, frame, send
from builders import until
from fastapi.testclient import TestClient
from frames import state

from perfagent.errors import WireError
from perfagent.wire import Event, Finding
from perfagent_server.runs.rule_profiles import MOST, PAUSE_S
from perfagent_server.services import Services


@pytest.fixture
def client(tmp_path: Path) -> Any:
    with api(tmp_path) as running:
        yield running


def services(client: TestClient) -> Services:
    found: Services = client.app.state.services  # type: ignore[attr-defined]
    return found


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
    services(client).engine.run_once()  # waits for the round that fired it
    services(client).database.write(lambda _: None)
    return dict(found[0])


def orders(client: TestClient) -> list[dict[str, Any]]:
    return list(client.get("/api/v1/runs/r1/commands").json()["commands"])


def counted(client: TestClient) -> dict[str, int]:
    return dict(client.get("/api/v1/self", headers=ADMIN).json()["counters"]["rule_profiles"])


def asked(client: TestClient, alert: str, rule: str = "data_bound", ranks: tuple[int, ...] = ()) -> Any:
    """What comes of one more firing of an alert; None where nothing is asked."""
    finding = Finding(rule=rule, severity="warning", message="m", since_step=3, ranks=[*ranks])
    future = services(client).rule_profiles.fired("r1", alert, finding)
    assert isinstance(future, Future)
    return future.result(10)


def test_an_alert_has_the_first_of_its_ranks_profiled_and_says_for_what(client: TestClient) -> None:
    start(client)
    alert = fire(client, "comm_bound", 2, ranks=[1, 0], message="Rank 1 is slow.")
    (order,) = orders(client)
    assert (order["kind"], order["ranks"], order["who"]) == ("profile", [1], "rule comm_bound")
    assert (order["rule"], order["alert"], order["why"]) == ("comm_bound", alert["id"], "Rank 1 is slow.")
    (handed,) = send(client, frame({}, rank=1, seq=2))["commands"]
    assert handed["params"] == {"steps": 5, "rule": "comm_bound", "since_step": 1}
    assert counted(client) == {"asked": 1, "held_back": 0}


def test_an_alert_that_names_no_rank_has_rank_0_profiled(client: TestClient) -> None:
    start(client)
    assert asked(client, "al_1").ranks == [0]


def test_without_the_switch_nothing_is_asked_and_nothing_counted(client: TestClient) -> None:
    start(client, on=("comm_bound",))
    fire(client, "data_bound", 2)
    assert (orders(client), counted(client)) == ([], {"asked": 0, "held_back": 0})
    client.put("/api/v1/rules/data_bound", params={"project": "elsewhere"}, json={"profile": True}, headers=ADMIN)
    assert asked(client, "al_1") is None
    client.put("/api/v1/rules/data_bound", params={"project": "p"}, json={"profile": True}, headers=ADMIN)
    assert asked(client, "al_1") is not None


def test_a_second_alert_soon_after_asks_nothing_and_is_counted(client: TestClient) -> None:
    start(client)
    first = fire(client, "data_bound", 2)
    fire(client, "comm_bound", 3, ranks=[1])
    assert [one["alert"] for one in orders(client)] == [first["id"]]
    assert counted(client) == {"asked": 1, "held_back": 1}


def test_an_alert_asks_once_also_when_it_opens_again_or_is_judged_again_after_a_restart(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        start(client)
        assert asked(client, "al_1") is not None
        assert asked(client, "al_1") is None
    with api(tmp_path) as client:
        later = services(client).rule_profiles
        later._clock = lambda: time.time() + 2 * PAUSE_S
        assert asked(client, "al_1") is None
        assert counted(client) == {"asked": 0, "held_back": 0}, "not held back: it has its profile"
        later._clock = time.time
        assert asked(client, "al_2") is None, "the pause outlives the restart"
        assert counted(client)["held_back"] == 1


def test_after_the_pause_another_is_taken_up_to_the_most_of_a_run(client: TestClient) -> None:
    start(client)
    clock = [time.time()]
    services(client).rule_profiles._clock = services(client).orders._clock = lambda: clock[0]
    services(client).orders._began = 4e9  # no agent is called silent
    for number in range(MOST):
        assert asked(client, f"al_{number}") is not None
        clock[0] += PAUSE_S - 1
        assert asked(client, f"al_{number}_soon") is None
        clock[0] += 2
    assert asked(client, "al_more") is None
    assert counted(client) == {"asked": MOST, "held_back": MOST + 1}
    assert len(orders(client)) == MOST


def test_a_run_that_has_ended_and_an_agent_that_is_silent_are_asked_for_nothing(client: TestClient) -> None:
    start(client)
    services(client).orders._began = 0.0
    services(client).orders._clock = lambda: time.time() + 61.0
    with pytest.raises(WireError, match="rank 0 is silent"):
        asked(client, "al_1")
    services(client).orders._clock = time.time
    for rank in (0, 1):
        send(client, frame({}, rank=rank, seq=2, events=[state("finished")]))
    with pytest.raises(WireError, match=r"has ended \(finished\)"):
        asked(client, "al_1")
    assert (orders(client), counted(client)) == ([], {"asked": 0, "held_back": 0})


def test_what_somebody_asks_for_leaves_room_and_is_no_reason_to_wait(client: TestClient) -> None:
    start(client)
    client.post("/api/v1/runs/r1/commands", json={"kind": "profile"}).raise_for_status()
    assert asked(client, "al_1") is not None
    by_hand = orders(client)[1]
    assert (by_hand["rule"], by_hand["alert"]) == ("", "")


def test_a_profile_says_for_which_alert_it_was_taken_and_the_alert_names_it(client: TestClient) -> None:
    start(client)
    alert = fire(client, "data_bound", 2)
    (order,) = orders(client)
    summary = {"profile": "ab12", "command": order["id"], "first_step": 3, "last_step": 7, "parts": 1}
    summary |= {"says": ["It waits."], "shares": {"steps_s": 1.0}}
    piece = {"profile": "ab12", "part": 1, "parts": 1, "payload": b"x"}
    by_hand = {"profile": "cd34", "command": "cm_unknown", "first_step": 3, "last_step": 7, "parts": 0}
    events = [Event(kind="profile", time=1.0, step=7, data=data) for data in (summary, piece, by_hand)]
    send(client, frame({}, seq=3, events=events))
    listed = {one["id"]: one for one in client.get("/api/v1/runs/r1/profiles").json()["profiles"]}
    assert (listed["ab12"]["alert"], listed["ab12"]["rule"]) == (alert["id"], "data_bound")
    assert (listed["ab12"]["who"], listed["ab12"]["says"]) == ("rule data_bound", ["It waits."])
    assert client.get(listed["ab12"]["url"]).content == b"x"
    assert (listed["cd34"]["alert"], listed["cd34"]["rule"], listed["cd34"]["url"]) == ("", "", "")
    shown = client.get(f"/api/v1/alerts/{alert['id']}").json()
    assert [(one["id"], one["url"]) for one in shown["profiles"]] == [("ab12", listed["ab12"]["url"])]
