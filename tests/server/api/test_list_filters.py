"""Every query parameter that a list of the API documents changes its answer, or is refused with a sentence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from api_builders import ADMIN, api, frame, send
from builders import until
from fastapi.testclient import TestClient

from perfagent.wire import Event

GIVEN: dict[str, Any] = {
    "project": "other", "name": "b", "state": "finished", "tag": "night", "limit": 1, "with": "verdict", "sort": "name",
    "order": "asc", "severity": "unknown", "q": "night", "group": "sweep", "attention": True, "columns": "config:lr",
    "offset": 1, "since": "2999-01-01T00:00:00Z",
}  # fmt: skip
"""A value of each parameter of GET /runs that lets through some of the runs below, or shows them otherwise."""


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    with api(tmp_path_factory.mktemp("lists")) as client:
        for run, project, values, more in (
            ("a", "p", {"loss": [1.0, 2.0]}, {}), ("b", "other", {"loss": [1.0]}, {"tags": ["night"], "group": "sweep"}),
            ("c", "p", {}, {}),
        ):  # fmt: skip
            began = Event(kind="state", time=1.0, step=0, data={"state": "running", "config": {"lr": 0.1}, **more})
            send(client, frame(values, run=run, project=project, name=run, events=[began]))
        ended = Event(kind="state", time=2.0, step=1, data={"state": "finished"})
        send(client, frame({}, run="b", project="other", seq=2, events=[ended]))
        until(lambda: client.get("/api/v1/runs/b").json()["severity"] == "healthy")
        yield client


def _runs(client: TestClient, **asked: Any) -> Any:
    return client.get("/api/v1/runs", params=asked, headers=ADMIN)


def documented(client: TestClient) -> set[str]:
    return {one["name"] for one in client.get("/openapi.json").json()["paths"]["/api/v1/runs"]["get"]["parameters"]}


def test_every_documented_filter_is_tried_below(client: TestClient) -> None:
    assert documented(client) == {*GIVEN, "cursor"}


@pytest.mark.parametrize("parts", [{}, {"with": "latest"}])
@pytest.mark.parametrize("parameter", [*GIVEN, "cursor"])
def test_a_parameter_changes_the_list_of_runs_or_is_refused(
    client: TestClient, parameter: str, parts: dict[str, str]
) -> None:
    value = GIVEN[parameter] if parameter in GIVEN else _runs(client, limit=1).json()["next"]
    answer = _runs(client, **{**parts, parameter: value})
    if answer.status_code == 422:
        refused = answer.json()["error"]
        assert refused["field"] == parameter and parameter in refused["message"]
        assert parameter in (("cursor",) if parts else ("sort", "order", "offset", "columns"))
    else:
        assert answer.status_code == 200
        assert answer.json() != _runs(client, **parts).json()


@pytest.mark.parametrize("parts", [{}, {"with": "latest"}])
def test_several_states_and_severities_add_up(client: TestClient, parts: dict[str, str]) -> None:
    def found(**asked: Any) -> list[str]:
        return sorted(row["run"] for row in _runs(client, **parts, **asked).json()["runs"])

    assert found(state=["running", "starting"]) == ["a", "c"]
    assert found(state=["running", "finished", "starting"]) == ["a", "b", "c"]
    assert found(severity=["unknown", "healthy"]) == ["a", "b", "c"]
    assert found(severity=["unknown"], state=["finished"]) == []
    assert found(q="nothing") == []


@pytest.mark.parametrize(
    ("path", "twice"),
    [("/runs", "project"), ("/alerts", "state"), ("/deliveries", "state"), ("/audit", "action"), ("/rules", "project")],
)
def test_what_may_be_given_once_and_comes_twice_is_refused(client: TestClient, path: str, twice: str) -> None:
    answer = client.get(f"/api/v1{path}", params={twice: ["firing", "resolved"]}, headers=ADMIN)
    assert answer.status_code == 422
    assert answer.json()["error"]["field"] == twice
