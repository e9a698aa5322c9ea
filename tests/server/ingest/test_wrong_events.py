"""A wrong event is refused alone: named in the answer, counted, and neither stored nor judged."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from api_builders import MSGPACK, api, frame, send, services_of
from builders import until
from fastapi.testclient import TestClient

from perfagent.wire import Event, Frame

_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    with api(tmp_path_factory.mktemp("wrong")) as running:
        yield running


def sent(*events: Any, loss: float = 1.0) -> Frame:
    """The next frame of a new run."""
    made = frame({"loss": [loss]}, run=f"r{next(_numbers)}")
    made.events = list(events)
    return made


def events_of(client: TestClient, run: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = client.get(f"/api/v1/runs/{run}/events").json()["events"]
    return found


@pytest.mark.fault
def test_a_state_that_is_a_list_costs_neither_samples_nor_alerts(client: TestClient) -> None:
    wrong = sent(Event(kind="state", time=1.0, data={"state": []}), Event(kind="log", time=1.0, data={"lines": ["x"]}))
    wrong.seq = 2
    before = services_of(client).counters()["ingest"]["rejected_events"]
    answer = send(client, wrong)
    (rejected,) = answer["rejected"]
    assert (answer["stored"], rejected["name"], rejected["count"]) == (1, "event:state", 1)
    assert "[]" in rejected["reason"] and "finished" in rejected["reason"]
    assert [event["kind"] for event in events_of(client, wrong.run)] == ["log"]
    again = send(client, wrong)
    assert (again["duplicate"], again["rejected"]) == (1, [rejected]), "the first answer may have been lost"
    assert services_of(client).counters()["ingest"]["rejected_events"] - before == 1
    bad = send(client, sent(loss=float("nan")))
    assert bad["stored"] == 1
    until(lambda: any(one["rule"] == "nonfinite_loss" for one in client.get("/api/v1/alerts").json()["alerts"]))


ODD_EVENTS = [
    ({"kind": "log", "time": 1.0, "step": -1, "data": {}}, "event:log"),
    ({"kind": "log", "time": 1.0, "step": 2**64 - 1, "data": {}}, "event:log"),
    ({"kind": "log", "time": 1.0, "step": 1.5, "data": {}}, "event:log"),
    ({"kind": "new", "time": 1.0, "step": 2**53 + 1, "data": {}}, "event"),
    ({"kind": "alert", "time": "now", "data": {}}, "event:alert"),
    ({"kind": "alert", "time": 1.0, "data": []}, "event:alert"),
    ({"kind": 1, "time": 1.0}, "event"),
    (None, "event"),
    ({"kind": "state", "time": 1.0, "data": {"state": "running", "training_after": "the first"}}, "event:state"),
    ({"kind": "state", "time": 1.0, "data": {"state": "finished", "continues": 7}}, "event:state"),
    ({"kind": "alert", "time": 1.0, "data": {"title": msgspec.Raw(b"\xa1\xff")}}, "event:alert"),
]


@pytest.mark.fault
def test_an_event_that_is_none_costs_no_samples(client: TestClient) -> None:
    for event, named in ODD_EVENTS:
        made = sent()
        body = msgspec.to_builtins(made, builtin_types=(bytes,))
        body["events"] = [event, {"kind": "log", "time": 1.0, "data": {"lines": ["x"]}}]
        answer = client.post("/api/v1/ingest", content=msgspec.msgpack.encode(body), headers=MSGPACK)
        assert (answer.status_code, answer.json()["stored"]) == (200, 1), event
        assert [(one["name"], one["count"]) for one in answer.json()["rejected"]] == [(named, 1)], event
        assert [one["data"] for one in events_of(client, made.run)] == [{"lines": ["x"]}]


def test_unknown_kinds_and_fields_are_stored_as_they_are(client: TestClient) -> None:
    told = {"state": "running", "of_a_newer_agent": [{"a": [1]}]}
    made = sent(Event(kind="state", time=1.0, data=told), Event(kind="newer", time=1.0, data={"state": []}))
    assert send(client, made)["rejected"] == []
    assert [event["data"] for event in events_of(client, made.run)] == [told, {"state": []}]
