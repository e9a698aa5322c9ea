"""Which frames are stored where they say, and which are refused alone."""

from __future__ import annotations

from pathlib import Path

from api_builders import ADMIN, MSGPACK, api, frame, send
from fastapi.testclient import TestClient

from perfagent.wire import Event, Frame, encode


def refused(client: TestClient, sent: Frame, **headers: str) -> tuple[int, str]:
    answer = client.post("/api/v1/ingest", content=encode(sent), headers={**MSGPACK, **headers})
    return answer.status_code, answer.json()["error"]["message"]


def key_for(client: TestClient, project: str) -> dict[str, str]:
    made = client.post("/api/v1/keys", json={"scope": "ingest", "project": project}, headers=ADMIN).json()
    return {"Authorization": f"Bearer {made['key']}"}


def starting(**data: object) -> Event:
    return Event(kind="state", time=1_700_000_000.0, data={"state": "starting", **data})


def test_a_key_of_one_project_does_not_write_into_a_run_of_another(tmp_path: Path) -> None:
    with api(tmp_path, auth="required") as client:
        theirs, mine = key_for(client, "theirs"), key_for(client, "mine")
        send(client, frame({"loss": [1.0, 2.0]}, project="theirs", events=[starting()]), **theirs)
        before = client.get("/api/v1/runs/r1", headers=ADMIN).json()
        stolen = frame({"loss": [9.0]}, project="mine", source="other", attempt=9, events=[starting(start_step=0)])
        status, message = refused(client, stolen, **mine)
        assert (status, "'mine'" in message, "theirs" in message) == (403, True, False)
        known_source = frame({"loss": [9.0]}, project="mine", seq=2, events=[starting()])
        assert refused(client, known_source, **mine)[0] == 403
        # as if it were a retry: it must not learn that this is here
        again = frame({"loss": [1.0, 2.0]}, project="mine")
        assert refused(client, again, **mine)[0] == 403
        assert client.get("/api/v1/runs/r1", headers=ADMIN).json() == before
        assert client.get("/api/v1/runs/r1/series?name=loss", headers=ADMIN).json()["mean"] == [1.0, 2.0]


def test_a_run_may_move_to_another_project_by_whoever_may_send_to_both(tmp_path: Path) -> None:
    """`perfagent run --project vision` of a script that says attach(project="look"), of several ranks, started
    again."""
    with api(tmp_path) as client:
        send(client, frame({"loss": [1.0]}, project="vision", events=[starting()]))
        send(client, frame({"loss": [2.0]}, project="look", seq=2, first_step=2, events=[starting()]))
        send(client, frame({"loss": [3.0]}, project="vision", rank=1))
        send(client, frame({"loss": [4.0]}, project="vision", attempt=2, first_step=3, events=[starting()]))
        assert client.get("/api/v1/runs/r1").json()["project"] == "vision"
        assert client.get("/api/v1/runs/r1/series?name=loss&rank=0").json()["mean"] == [1.0, 2.0, 4.0]


def test_a_source_is_one_process_of_one_attempt(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        send(client, frame({"loss": [1.0]}, run="a", source="s1"))
        for other in (
            frame({"loss": [1.0]}, run="b", source="s1"),  # the same number: this was called a duplicate
            frame({"loss": [1.0]}, run="b", source="s1", seq=2),
            frame({"loss": [1.0]}, run="a", source="s1", seq=2, attempt=2),
            frame({"loss": [1.0]}, run="a", source="s1", seq=2, rank=1),
        ):
            status, message = refused(client, other)
            assert (status, "source s1 is known as run a, attempt 1, rank 0" in message) == (422, True)
        assert [run["run"] for run in client.get("/api/v1/runs").json()["runs"]] == ["a"]
        send(client, frame({"loss": [2.0]}, run="a", source="s1", seq=2, first_step=2))
        assert client.get("/api/v1/runs/a/series?name=loss").json()["mean"] == [1.0, 2.0]


def test_a_refused_frame_costs_its_neighbors_of_one_transaction_nothing(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        ingest = client.app.state.services.ingest  # type: ignore[attr-defined]
        frames = [
            frame({"loss": [1.0]}, run="a", source="s1"),
            frame({"loss": [1.0]}, run="b", source="s1", seq=2),
            frame({"loss": [1.0]}, run="c"),
        ]
        receipts = ingest.accept_and_wait(frames)
        assert [(receipt.stored, receipt.refused is None) for receipt in receipts] == [(1, True), (0, False), (1, True)]
        assert ingest.counters["refused_frames"] == 1
