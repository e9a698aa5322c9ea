"""Which frames are stored where they say, and which are refused alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from api_builders import ADMIN, MSGPACK, api, frame, send, services_of
from fastapi.testclient import TestClient
from frames import state

from perfagent.wire import Frame, encode


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    with api(tmp_path_factory.mktemp("belonging")) as running:
        yield running


def refused(client: TestClient, sent: Frame, **headers: str) -> tuple[int, str]:
    answer = client.post("/api/v1/ingest", content=encode(sent), headers={**MSGPACK, **headers})
    return answer.status_code, answer.json()["error"]["message"]


def key_for(client: TestClient, project: str) -> dict[str, str]:
    made = client.post("/api/v1/keys", json={"scope": "ingest", "project": project}, headers=ADMIN).json()
    return {"Authorization": f"Bearer {made['key']}"}


def mean(client: TestClient, run: str) -> list[float]:
    found: list[float] = client.get(f"/api/v1/runs/{run}/series?name=loss&rank=0", headers=ADMIN).json()["mean"]
    return found


def test_a_key_of_one_project_writes_into_no_run_of_another(tmp_path: Path) -> None:
    with api(tmp_path, auth="required") as client:
        theirs, mine = key_for(client, "theirs"), key_for(client, "mine")
        send(client, frame({"loss": [1.0, 2.0]}, project="theirs", events=[state("starting")]), **theirs)
        before = client.get("/api/v1/runs/r1", headers=ADMIN).json()
        begins = [state("starting", start_step=0)]
        for stolen in (
            frame({"loss": [9.0]}, project="mine", source="other", attempt=9, events=begins),
            frame({"loss": [9.0]}, project="mine", seq=2, events=begins),  # of a source that is known
            frame({"loss": [1.0, 2.0]}, project="mine"),  # as if it were a retry: it must not learn that this is here
        ):
            status, message = refused(client, stolen, **mine)
            assert (status, "'mine'" in message, "theirs" in message) == (403, True, False)
        assert client.get("/api/v1/runs/r1", headers=ADMIN).json() == before
        assert mean(client, "r1") == [1.0, 2.0]
        assert refused(client, frame({"loss": [1.0]}, project="other", run="r2"), **mine)[0] == 403
        row = {"project": "other", "run": "x", "metrics": {"a": 1}}
        assert client.post("/api/v1/log", json=row, headers=mine).status_code == 403


def test_a_run_moves_to_another_project_by_who_may_send_to_both(client: TestClient) -> None:
    """`perfagent run --project vision` of a script that says attach(project="look"), of several ranks, started
    again."""
    begins = [state("starting")]
    send(client, frame({"loss": [1.0]}, project="vision", events=begins))
    send(client, frame({"loss": [2.0]}, project="look", seq=2, first_step=2, events=begins))
    send(client, frame({"loss": [3.0]}, project="vision", rank=1))
    send(client, frame({"loss": [4.0]}, project="vision", attempt=2, first_step=3, events=begins))
    assert client.get("/api/v1/runs/r1").json()["project"] == "vision"
    assert mean(client, "r1") == [1.0, 2.0, 4.0]


def test_a_source_is_one_process_of_one_attempt(client: TestClient) -> None:
    send(client, frame({"loss": [1.0]}, run="a", source="s1"))
    for other in (
        frame({"loss": [1.0]}, run="b", source="s1"),  # the same number: this was called a duplicate
        frame({"loss": [1.0]}, run="b", source="s1", seq=2),
        frame({"loss": [1.0]}, run="a", source="s1", seq=2, attempt=2),
        frame({"loss": [1.0]}, run="a", source="s1", seq=2, rank=1),
    ):
        status, message = refused(client, other)
        assert (status, "s1 is known as run a, attempt 1, rank 0" in message) == (422, True)
    assert client.get("/api/v1/runs/b").status_code == 404
    send(client, frame({"loss": [2.0]}, run="a", source="s1", seq=2, first_step=2))
    assert mean(client, "a") == [1.0, 2.0]


def test_a_refused_frame_costs_its_neighbors_nothing(client: TestClient) -> None:
    """Those of one transaction."""
    ingest = services_of(client).ingest
    before = ingest.counters["refused_frames"]
    sent = [("c", "s2", 1), ("d", "s2", 2), ("e", "s3", 1)]
    receipts = ingest.accept_and_wait([frame({"loss": [1.0]}, run=run, source=of, seq=seq) for run, of, seq in sent])
    assert [(receipt.stored, receipt.refused is None) for receipt in receipts] == [(1, True), (0, False), (1, True)]
    assert ingest.counters["refused_frames"] - before == 1
