"""What a run is asked for: handed to each of its processes once, refused with a sentence, and answered."""

from __future__ import annotations

import gzip
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from api_builders import ADMIN, api, frame, send
from builders import until
from fastapi.testclient import TestClient
from frames import state
from sqlalchemy import Connection, update

from perfagent.wire import Event
from perfagent_server.runs.run_commands import MOST_OPEN, Request
from perfagent_server.store.tables import source
from perfagent_server.store.write.lifecycle import mark_lost
from perfagent_server.timestamps import rfc3339


@pytest.fixture
def client(tmp_path: Path) -> Any:
    with api(tmp_path) as running:
        yield running


def start(client: TestClient, *ranks: int, world_size: int = 1) -> None:
    client.app.state.services.orders._began = 0.0  # type: ignore[attr-defined]
    for rank in ranks or (0,):
        send(client, frame({"loss": [1.0]}, rank=rank, events=[state("starting", world_size=world_size)]))


def ask(client: TestClient, **body: Any) -> Any:
    answer = client.post("/api/v1/runs/r1/commands", json=body)
    assert answer.status_code == 201, answer.text
    return answer.json()


def next_frame(client: TestClient, seq: int, rank: int = 0, *events: Event) -> list[dict[str, Any]]:
    sent = frame({"loss": [1.0]}, seq=seq, rank=rank, first_step=seq, events=events)
    commands: list[dict[str, Any]] = send(client, sent)["commands"]
    return commands


def orders(client: TestClient) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = client.get("/api/v1/runs/r1/commands").json()["commands"]
    return found


def answered(command: str, how: str, **more: Any) -> Event:
    return Event(kind="command", time=1.0, data={"command": command, "state": how, **more})


def test_a_command_goes_out_once_with_the_answer_to_a_frame(client: TestClient) -> None:
    start(client)
    order = ask(client, kind="profile", steps=7)
    assert (order["state"], order["ranks"]) == ("waiting", [0])
    assert next_frame(client, 2) == [{"id": order["id"], "kind": "profile", "params": {"steps": 7}}]
    assert next_frame(client, 3) == []
    assert orders(client)[0]["state"] == "handed"


def test_a_frame_whose_answer_was_lost_gets_its_command_again(client: TestClient) -> None:
    start(client)
    order = ask(client, kind="stacks")
    assert [one["id"] for one in next_frame(client, 2)] == [order["id"]]
    assert [one["id"] for one in next_frame(client, 2)] == [order["id"]], "the same frame again"
    assert next_frame(client, 3) == []


def test_every_process_gets_it_unless_ranks_are_named(client: TestClient) -> None:
    start(client, 0, 1, 2, world_size=3)
    everyone, one = ask(client, kind="stacks"), ask(client, kind="stacks", ranks=[2])
    assert [[c["id"] for c in next_frame(client, 2, rank)] for rank in (0, 1, 2)] == [
        [everyone["id"]], [everyone["id"]], [everyone["id"], one["id"]],
    ]  # fmt: skip


def test_commands_that_were_not_stored_are_not_open(client: TestClient) -> None:
    start(client)
    services = client.app.state.services  # type: ignore[attr-defined]
    request = Request(run="r1", kind="stacks", params={}, who="somebody")

    def fails(connection: Connection) -> None:
        services.orders.issuing(request)(connection)
        raise ValueError("whatever comes behind it in the transaction")

    for _ in range(MOST_OPEN):
        with pytest.raises(ValueError, match="whatever"):
            services.database.write(fails)
    order = ask(client, kind="stacks")
    assert [one["id"] for one in next_frame(client, 2)] == [order["id"]]


def test_a_run_that_was_deleted_may_ask_again_at_once(client: TestClient) -> None:
    for seq in (1, 2):
        start(client)
        asked = client.app.state.services.orders.ask("r1", "stacks", rule="hang", why="it stands")  # type: ignore[attr-defined]
        assert asked is not None and asked.result().kind == "stacks", seq
        assert client.delete("/api/v1/runs/r1", headers=ADMIN).status_code == 204


def test_a_frame_that_carries_no_sample_gets_it_too(client: TestClient) -> None:
    """A hung process sends nothing but signs of life."""
    start(client)
    order = ask(client, kind="stacks")
    assert [one["id"] for one in send(client, frame({}, seq=2))["commands"]] == [order["id"]]


def test_what_became_of_it_is_shown(client: TestClient) -> None:
    start(client, 0, 1, world_size=2)
    order = ask(client, kind="profile", ranks=[0, 1])
    for rank in (0, 1):
        next_frame(client, 2, rank)
    next_frame(client, 3, 0, answered(order["id"], "done"))
    next_frame(client, 3, 1, answered(order["id"], "refused", message="a profile is under way"))
    next_frame(client, 4, 0, answered(order["id"], "accepted"))  # however late: done stays done
    (shown,) = orders(client)
    assert shown["state"] == "refused"
    assert [(one["rank"], one["state"], one["message"]) for one in shown["sources"]] == [
        (0, "done", ""), (1, "refused", "a profile is under way"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({}, "kind is missing"),
        ({"kind": "reboot"}, "allowed are profile, stacks, flush, sampling"),
        ({"kind": ["profile"]}, "allowed are profile"),
        ({"kind": "profile", "steps": 0}, "a whole number from 1 to 100"),
        ({"kind": "profile", "steps": 2.5}, "a whole number from 1 to 100"),
        ({"kind": "profile", "steps": 10**400}, "a whole number from 1 to 100"),
        ({"kind": "sampling", "sample_s": 10**400}, "a number from 0.5 to 3600"),
        ({"kind": "profile", "steps": True}, "a whole number from 1 to 100"),
        ({"kind": "profile", "speed": 1}, "no parameter 'speed'; it takes steps"),
        ({"kind": "profile", "shapes": "yes"}, "true or false"),
        ({"kind": "stacks", "steps": 3}, "it takes none but ranks"),
        ({"kind": "sampling"}, "at least one of overhead_budget_pct, sample_s"),
        ({"kind": "stacks", "ranks": []}, "a list of whole numbers"),
        ({"kind": "stacks", "ranks": [-1]}, "a list of whole numbers"),
    ],
)
def test_what_cannot_be_asked_is_refused_with_what_can(client: TestClient, body: dict[str, Any], says: str) -> None:
    start(client)
    answer = client.post("/api/v1/runs/r1/commands", json=body)
    assert answer.status_code == 422
    assert says in answer.json()["error"]["message"]
    assert orders(client) == []


def test_a_rank_that_is_not_there_is_refused(client: TestClient) -> None:
    start(client, world_size=2)
    answer = client.post("/api/v1/runs/r1/commands", json={"kind": "stacks", "ranks": [5]})
    assert answer.status_code == 409
    assert answer.json()["error"]["message"] == "rank 5 is not in this run; its ranks are 0 to 1"


def test_a_run_that_has_ended_is_asked_for_nothing(client: TestClient) -> None:
    start(client)
    order = ask(client, kind="stacks")
    assert next_frame(client, 2, 0, state("finished")) == [], "its process is about to be gone"
    answer = client.post("/api/v1/runs/r1/commands", json={"kind": "stacks"})
    assert answer.status_code == 409
    assert "has ended (finished)" in answer.json()["error"]["message"]
    assert orders(client)[0]["id"] == order["id"]


def change_source(client: TestClient, rank: int = 0, *, attempt: int = 1, **values: Any) -> None:
    here = update(source).where(source.c.id == f"r1-{attempt}-{rank}")
    client.app.state.services.database.write(lambda connection: connection.execute(here.values(**values)))  # type: ignore[attr-defined]


def lose(client: TestClient, *ranks: int) -> None:
    names = [f"r1-1-{rank}" for rank in ranks]
    client.app.state.services.database.write(lambda connection: mark_lost(connection, names))  # type: ignore[attr-defined]


def refusal(client: TestClient, run: str = "r1", **body: Any) -> str:
    answer = client.post(f"/api/v1/runs/{run}/commands", json=body)
    assert answer.status_code == 409, answer.text
    assert client.get(f"/api/v1/runs/{run}/commands").json()["commands"] == []
    return str(answer.json()["error"]["message"])


def test_a_lost_run_is_asked_for_nothing_and_how_long_it_is_silent_is_said(client: TestClient) -> None:
    start(client, 0, 1, world_size=2)
    for rank in (0, 1):
        change_source(client, rank, contact=time.time() - 240)
    lose(client, 0, 1)
    said = refusal(client, kind="stacks", ranks=[0, 1])
    assert said.startswith("nobody is there to answer: ranks 0, 1 are lost (last heard 4 min ago).")
    assert "see whether the process lives" in said
    assert "rank 0 is lost" in refusal(client, kind="profile")


def test_a_rank_that_was_never_heard_of_a_lost_run_is_lost_with_it(client: TestClient) -> None:
    start(client, world_size=2)
    lose(client, 0)
    assert "rank 1 is lost." in refusal(client, kind="stacks", ranks=[1])


def test_a_run_that_logs_without_an_agent_is_asked_for_nothing(client: TestClient) -> None:
    answer = client.post("/api/v1/log", json={"run": "curl", "metrics": {"loss": 1.0}})
    run = answer.json()["run"]
    for body in ({"kind": "stacks"}, {"kind": "profile"}, {"kind": "stacks", "ranks": [0]}):
        said = refusal(client, run, **body)
        assert "rank 0 logs over HTTP, without an agent. Only" in said
        assert "perfagent.attach() or `perfagent run`" in said


def test_an_agent_that_is_silent_is_asked_for_nothing_before_it_is_called_lost(client: TestClient) -> None:
    """After a restart of the server nobody is called lost for a minute."""
    start(client)
    change_source(client, contact=time.time() - 45)
    assert ask(client, kind="flush")["asked"][0]["problem"] == "", "nine signs of life may be late"
    client.app.state.services.orders.forget("r1")  # type: ignore[attr-defined]
    now = time.time()
    client.app.state.services.orders._clock = lambda: now  # type: ignore[attr-defined]
    change_source(client, contact=now - 61)
    answer = client.post("/api/v1/runs/r1/commands", json={"kind": "stacks"})
    assert (answer.status_code, len(orders(client))) == (409, 1)
    assert "rank 0 is silent (last heard 61 s ago)" in answer.json()["error"]["message"]
    next_frame(client, 2)
    assert ask(client, kind="stacks")["asked"][0]["problem"] == ""


def test_after_a_restart_of_the_server_agents_are_given_time_to_be_heard(client: TestClient) -> None:
    start(client)
    change_source(client, contact=time.time() - 300)
    client.app.state.services.orders._began = time.time() - 30  # type: ignore[attr-defined]
    assert ask(client, kind="stacks")["asked"][0]["problem"] == ""


def test_whoever_can_answer_is_asked_and_of_the_others_it_is_told_why_not(client: TestClient) -> None:
    start(client, 0, 1, 2, world_size=5)
    before = time.time() - 300
    change_source(client, 1, contact=before)
    lose(client, 1)
    next_frame(client, 2, 2, state("finished"))
    client.post("/api/v1/log", json={"project": "p", "run": "r1", "metrics": {"x": 1.0}, "rank": 4})
    order = ask(client, kind="stacks", ranks=[0, 1, 2, 3, 4])
    asked = {one["rank"]: one for one in order["asked"]}
    assert {rank: (one["state"], one["problem"]) for rank, one in asked.items()} == {
        0: ("running", ""), 1: ("lost", "lost"), 2: ("finished", "ended"), 3: (None, ""), 4: (asked[4]["state"], "no_agent"),
    }  # fmt: skip
    assert asked[1]["heard"] == rfc3339(before)
    assert asked[3]["heard"] is None, "it may still come"
    assert orders(client)[0]["asked"] == order["asked"]
    assert [one["rank"] for one in ask(client, kind="stacks")["asked"]] == [0, 1, 2, 4], "all that were heard"
    said = client.post("/api/v1/runs/r1/commands", json={"kind": "stacks", "ranks": [1, 2]}).json()["error"]["message"]
    assert re.search(r"rank 2 has ended \(last heard \d s ago\); rank 1 is lost \(last heard 5 min ago\)", said), said


def test_only_the_newest_start_of_the_job_is_asked(client: TestClient) -> None:
    start(client)
    send(client, frame({"loss": [1.0]}, attempt=2, events=[state("starting")]))
    change_source(client, attempt=2, contact=time.time() - 120)
    assert "rank 0 is silent (last heard 2 min ago)" in refusal(client, kind="stacks")


def test_an_older_start_of_the_job_gets_nothing(client: TestClient) -> None:
    start(client)
    send(client, frame({"loss": [1.0]}, attempt=2, events=[state("starting")]))
    order = ask(client, kind="stacks")
    assert next_frame(client, 2) == []
    assert [one["id"] for one in send(client, frame({}, seq=2, attempt=2))["commands"]] == [order["id"]]


def test_open_commands_outlive_a_restart(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        start(client, 0, 1, world_size=2)
        order = ask(client, kind="stacks")
        next_frame(client, 2, 0)
    with api(tmp_path) as client:
        assert next_frame(client, 3, 0) == [], "handed out before the restart"
        assert [one["id"] for one in next_frame(client, 2, 1)] == [order["id"]]


def test_a_rule_asks_a_run_once_in_a_while(client: TestClient) -> None:
    start(client)
    asked = client.app.state.services.orders  # type: ignore[attr-defined]
    first = asked.ask("r1", "stacks", rule="hang", why="no step for 90 s")
    assert first is not None
    assert first.result(10).who == "rule hang"
    assert asked.ask("r1", "stacks", rule="hang", why="no step for 91 s") is None
    assert [one["why"] for one in orders(client)] == ["no step for 90 s"]


def test_a_hang_asks_every_rank_for_its_stacks(client: TestClient) -> None:
    start(client, 0, 1, world_size=2)
    data = {"rule": "hang", "severity": "critical", "message": "No step for 90 s.", "since_step": 1}
    next_frame(client, 2, 0, Event(kind="finding", time=1.0, step=1, data=data))
    (order,) = until(lambda: orders(client), why="nobody asked")
    assert (order["kind"], order["ranks"], order["who"], order["why"]) == (
        "stacks",
        None,
        "rule hang",
        "No step for 90 s.",
    )
    (alert,) = client.get("/api/v1/runs/r1/alerts").json()["alerts"]
    assert (order["rule"], order["alert"]) == ("hang", alert["id"])
    assert [one["id"] for one in next_frame(client, 2, 1)] == [order["id"]]


# ---- what comes back


def profile_events(trace: bytes, *, identity: str = "ab12", piece: int = 100, **summary: Any) -> list[Event]:
    pieces = [trace[at : at + piece] for at in range(0, len(trace), piece)]
    first = {"profile": identity, "command": "cm_1", "first_step": 3, "last_step": 7, "parts": len(pieces), **summary}
    events = [Event(kind="profile", time=1.0, step=7, data=first)]
    return events + [
        Event(
            kind="profile",
            time=1.0,
            data={"profile": identity, "part": number, "parts": len(pieces), "payload": content},
        )
        for number, content in enumerate(pieces, 1)
    ]


def test_a_trace_that_comes_in_pieces_is_downloaded_whole(client: TestClient) -> None:
    start(client)
    trace = gzip.compress(json.dumps({"traceEvents": [{"name": f"op{n}", "ts": n} for n in range(500)]}).encode())
    operators = [{"name": f"op{n}", "calls": n, "self_cpu_s": 1, "total_cpu_s": 2.5} for n in range(9)]
    events = profile_events(trace, operators=operators)
    last = events.pop()
    next_frame(client, 2, 0, *reversed(events))  # in any order
    path = "/api/v1/runs/r1/profiles"
    (listed,) = client.get(path).json()["profiles"]
    assert (listed["trace"], listed["first_step"], len(listed["operators"])) == ("arriving", 3, 5)
    assert client.get(f"{path}/ab12").status_code == 409
    next_frame(client, 3, 0, last)
    next_frame(client, 3, 0, last)
    answer = client.get(f"{path}/ab12")
    assert answer.headers["content-type"] == "application/gzip"
    assert answer.content == trace
    assert len(json.loads(gzip.decompress(answer.content))["traceEvents"]) == 500
    assert len(client.get(f"{path}/ab12/operators").json()["operators"]) == 9
    assert len(client.get("/api/v1/runs/r1/events", params={"kind": "profile"}).json()["events"]) == 1, (
        "pieces are no events"
    )
    assert client.get(f"{path}/nothere").status_code == 404


@pytest.mark.parametrize("identity", ["日本", "ab12٣", "ab/12", "Ω" * 8, ""])
def test_a_profile_whose_id_does_not_fit_a_file_name_is_not_kept(client: TestClient, identity: str) -> None:
    """The header that names the file of the trace is ASCII: a trace of another id was stored and could not be had."""
    start(client)
    next_frame(client, 2, 0, *profile_events(b"x" * 300, identity=identity))
    next_frame(client, 3, 0, *profile_events(b"x" * 300, identity="good1"))
    listed = client.get("/api/v1/runs/r1/profiles").json()["profiles"]
    assert [one["id"] for one in listed] == ["good1"]
    assert client.get("/api/v1/runs/r1/profiles/good1").status_code == 200


def test_a_profile_without_a_trace_says_why(client: TestClient) -> None:
    start(client)
    next_frame(client, 2, 0, *profile_events(b"", trace_left_out="the trace has 80 MiB"))
    answer = client.get("/api/v1/runs/r1/profiles/ab12")
    assert (answer.status_code, answer.json()["error"]["message"]) == (404, "the trace has 80 MiB")


def test_a_trace_that_its_agent_gave_up_is_not_waited_for(client: TestClient) -> None:
    start(client)
    order = ask(client, kind="profile")
    next_frame(client, 2)
    *events, _last = profile_events(b"x" * 300)
    events[0].data["command"] = order["id"]
    path = "/api/v1/runs/r1/profiles"
    next_frame(client, 3, 0, *events, answered(order["id"], "accepted"))
    assert client.get(f"{path}/ab12").status_code == 409
    why = "the training ended before its trace (3 pieces) was sent; 2 were"
    next_frame(client, 4, 0, answered(order["id"], "refused", message=why))
    assert [(one["trace"], one["note"]) for one in client.get(path).json()["profiles"]] == [("none", why)]
    answer = client.get(f"{path}/ab12")
    assert (answer.status_code, answer.json()["error"]["message"]) == (404, why)


def test_a_trace_whose_process_is_gone_is_not_waited_for_and_comes_with_its_spool_all_the_same(
    client: TestClient,
) -> None:
    start(client)
    *events, last = profile_events(b"x" * 300)
    next_frame(client, 2, 0, *events)
    next_frame(client, 3, 0, state("killed"))
    path = "/api/v1/runs/r1/profiles"
    (listed,) = client.get(path).json()["profiles"]
    assert (listed["trace"], listed["note"]) == ("none", "its process ended (killed) before the trace was sent")
    next_frame(client, 4, 0, last)  # sent by who finds it on the disk
    (listed,) = client.get(path).json()["profiles"]
    assert (listed["trace"], listed["note"]) == ("complete", "")
    assert client.get(f"{path}/ab12").content == b"x" * 300


@pytest.mark.parametrize(("answer", "after_s"), [(None, 601.0), ("accepted", 1201.0)])
def test_what_a_process_was_given_and_never_did_expires(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, answer: str | None, after_s: float
) -> None:
    """It was killed before it could say a word."""
    start(client)
    order = ask(client, kind="profile")
    next_frame(client, 2)
    if answer is not None:
        next_frame(client, 3, 0, answered(order["id"], answer))
    of_all = client.app.state.services.orders  # type: ignore[attr-defined]
    monkeypatch.setattr(of_all, "_clock", lambda: time.time() + after_s - 10.0)
    assert orders(client)[0]["state"] == (answer or "handed")
    monkeypatch.setattr(of_all, "_clock", lambda: time.time() + after_s)
    assert orders(client)[0]["state"] == "expired"
    next_frame(client, 4, 0, answered(order["id"], "done"))
    assert orders(client)[0]["state"] == "done", "its spool was found"


ODD: list[dict[str, Any]] = [
    {"profile": "../x", "part": 1, "payload": b"x"},
    {"profile": "ok", "part": 10**6, "payload": b"x"},
    {"profile": "ok", "part": 1, "payload": "text"},
    {"profile": "ok", "part": 1, "payload": b"x" * 2**21},
    {"profile": 7},
    {"profile": "ok", "parts": "many", "operators": "none"},
]


@pytest.mark.fault
@pytest.mark.parametrize("odd", ODD)
def test_x03_odd_pieces_cost_the_frame_nothing(client: TestClient, odd: dict[str, Any]) -> None:
    start(client)
    next_frame(client, 2, 0, Event(kind="profile", time=float("nan"), data=odd))
    assert client.get("/api/v1/runs/r1").json()["step"] == 2
    assert all(one["trace"] == "none" for one in client.get("/api/v1/runs/r1/profiles").json()["profiles"])


def test_a_deleted_run_takes_its_profiles_and_commands_along(client: TestClient) -> None:
    start(client)
    ask(client, kind="profile")
    next_frame(client, 2, 0, *profile_events(b"x" * 300))
    assert client.delete("/api/v1/runs/r1", headers=ADMIN).status_code == 204
    with client.app.state.services.database.read() as connection:  # type: ignore[attr-defined]
        for table in ("command", "command_source", "profile", "profile_part"):
            assert connection.exec_driver_sql(f"SELECT count(*) FROM {table}").scalar() == 0, table


def test_stacks_are_grouped_so_that_the_odd_rank_stands_out(client: TestClient) -> None:
    start(client, 0, 1, 2, world_size=3)
    for rank, where in ((0, "all_reduce"), (1, "all_reduce"), (2, "load_batch")):
        threads = [{"name": "MainThread", "training": True, "frames": ["train.py:1 in main", f"x.py:2 in {where}"]}]
        next_frame(
            client, 2, rank, Event(kind="stacks", time=2.0, step=4, data={"command": "cm_9", "threads": threads})
        )
    answer = client.get("/api/v1/runs/r1/stacks").json()
    assert [one["rank"] for one in answer["stacks"]] == [0, 1, 2]
    assert [(group["ranks"], group["frames"][-1]) for group in answer["groups"]] == [
        ([2], "x.py:2 in load_batch"), ([0, 1], "x.py:2 in all_reduce"),
    ]  # fmt: skip
    assert client.get("/api/v1/runs/r1/stacks", params={"command": "cm_other"}).json()["stacks"] == []


def test_a_deleted_run_that_comes_back_has_no_open_commands(client: TestClient) -> None:
    start(client)
    for _ in range(MOST_OPEN):
        ask(client, kind="stacks")
    assert "open already" in client.post("/api/v1/runs/r1/commands", json={"kind": "stacks"}).text
    assert client.delete("/api/v1/runs/r1", headers=ADMIN).status_code == 204
    start(client)
    assert next_frame(client, 2) == []
    order = ask(client, kind="stacks")
    assert [one["id"] for one in next_frame(client, 3)] == [order["id"]]
