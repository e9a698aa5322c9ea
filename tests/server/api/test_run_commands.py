"""What a run is asked for: handed to each of its processes once, refused with a sentence, and answered."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from api_builders import api, frame, send, services_of
from builders import until
from clocks import Clock
from fastapi.testclient import TestClient
from frames import state

from perfagent.wire import Event
from perfagent_server.rules.causes import reason_words
from perfagent_server.store.write.lifecycle import mark_lost
from perfagent_server.timestamps import rfc3339

BEGIN = 1_790_000_000.0


class Job:
    """Run r1 of a server whose clock is turned by hand. The server has run for an hour before."""

    def __init__(self, client: TestClient, clock: Clock, *ranks: int, world_size: int = 1) -> None:
        self.client, self.clock = client, clock
        clock.at += 3600
        for rank in ranks or (0,):
            begins = [state("starting", world_size=world_size)]
            send(client, frame({"loss": [1.0]}, rank=rank, events=begins))

    def frame(self, seq: int, rank: int = 0, *events: Event) -> list[str]:
        """Sends one; the commands in the answer."""
        sent = frame({"loss": [1.0]}, seq=seq, rank=rank, first_step=seq, events=events)
        return [one["id"] for one in send(self.client, sent)["commands"]]

    def post(self, run: str = "r1", **body: Any) -> Any:
        return self.client.post(f"/api/v1/runs/{run}/commands", json=body)

    def ask(self, kind: str, **body: Any) -> dict[str, Any]:
        answer = self.post(kind=kind, **body)
        assert answer.status_code == 201, answer.text
        return dict(answer.json())

    def refusal(self, *, run: str = "r1", **body: Any) -> str:
        answer = self.post(run, **body)
        assert answer.status_code == 409, answer.text
        return str(answer.json()["error"]["message"])

    def orders(self, run: str = "r1") -> list[dict[str, Any]]:
        return list(self.client.get(f"/api/v1/runs/{run}/commands").json()["commands"])

    def lose(self, *ranks: int) -> None:
        names = [f"r1-1-{rank}" for rank in ranks]
        services_of(self.client).database.write(lambda connection: mark_lost(connection, names))


@pytest.fixture
def clock() -> Clock:
    return Clock(BEGIN)


@pytest.fixture
def client(tmp_path: Path, clock: Clock) -> Iterator[TestClient]:
    with api(tmp_path, clocks={"clock": clock}) as running:
        yield running


@pytest.fixture
def job(client: TestClient, clock: Clock) -> Job:
    return Job(client, clock)


def answered(command: str, how: str, **more: Any) -> Event:
    return Event(kind="command", time=1.0, data={"command": command, "state": how, **more})


def test_a_command_goes_out_once_with_the_answer_to_a_frame(client: TestClient, clock: Clock) -> None:
    job = Job(client, clock, 0, 1, 2, world_size=3)
    order = job.ask("profile", steps=7)
    assert (order["state"], order["ranks"]) == ("waiting", [0])
    # also of one without a sample: a hung process sends nothing but signs of life
    wanted = [{"id": order["id"], "kind": "profile", "params": {"steps": 7}}]
    assert send(job.client, frame({}, seq=2))["commands"] == wanted
    assert send(job.client, frame({}, seq=2))["commands"] == wanted, "the answer may have been lost"
    assert job.frame(3) == []
    assert job.orders()[0]["state"] == "handed"
    everyone = job.ask("stacks")["id"]
    clock.at += 1  # they go out in the order in which they were asked
    one = job.ask("stacks", ranks=[2])["id"]
    assert [job.frame(4, rank) for rank in (0, 1, 2)] == [[everyone], [everyone], [everyone, one]]


@pytest.mark.sql
def test_a_stop_reaches_other_ranks_with_the_step_of_rank_0(tmp_path: Path, clock: Clock) -> None:
    with api(tmp_path, clocks={"clock": clock}) as client:
        job = Job(client, clock, 0, 1, world_size=2)
        order = job.ask("stop")["id"]
        assert job.frame(2, 1) == [], "rank 0 has not named a step yet"
        assert job.frame(2, 0) == [order]
        named = answered(order, "accepted", step=70, saves=False)
        assert job.frame(3, 0, named) == []
        late = frame({"loss": [1.0]}, seq=1, rank=1, attempt=2, events=[state("starting", world_size=2)])
        assert send(client, late)["commands"] == [], "the step is one of the attempt before"
    with api(tmp_path, clocks={"clock": clock}) as client:
        assert client.get("/api/v1/runs/r1/commands").json()["commands"][0]["params"]["step"] == 70


def test_a_rank_gets_the_step_and_who_asked(client: TestClient, clock: Clock) -> None:
    job = Job(client, clock, 0, 1, world_size=2)
    order = job.ask("stop")["id"]
    [first] = send(client, frame({}, seq=2))["commands"]
    assert list(first["params"]) == ["why"]
    job.frame(3, 0, answered(order, "accepted", step=70))
    [second] = send(client, frame({}, seq=2, rank=1))["commands"]
    assert second == {"id": order, "kind": "stop", "params": {"step": 70, "saves": True, "why": first["params"]["why"]}}
    assert "asked by" in second["params"]["why"]


def test_a_stop_that_rank_0_refuses_reaches_no_other_rank(client: TestClient, clock: Clock) -> None:
    job = Job(client, clock, 0, 1, world_size=2)
    order = job.ask("stop")["id"]
    job.frame(2, 0)
    job.frame(3, 0, answered(order, "refused", message="not stoppable"))
    assert job.frame(2, 1) == []
    (shown,) = job.orders()
    assert (shown["state"], [(one["rank"], one["message"]) for one in shown["sources"]]) == (
        "refused",
        [(0, "not stoppable")],
    )


def test_a_stop_takes_no_ranks(job: Job) -> None:
    assert job.post(kind="stop", ranks=[0]).status_code == 422


@pytest.mark.sql
def test_open_commands_outlive_a_restart(tmp_path: Path, clock: Clock) -> None:
    with api(tmp_path, clocks={"clock": clock}) as client:
        job = Job(client, clock, 0, 1, world_size=2)
        order = job.ask("stacks")
        assert job.frame(2, 0) == [order["id"]]
    with api(tmp_path, clocks={"clock": clock}) as client:
        job.client = client
        assert job.frame(3, 0) == [], "handed out before the restart"
        assert job.frame(2, 1) == [order["id"]]
        clock.at += 59
        assert job.ask("stacks")["asked"][0]["problem"] == "", "after a start agents have a minute to be heard"


@pytest.mark.sql
def test_a_hang_asks_every_rank_for_its_stacks_but_seldom(client: TestClient, clock: Clock) -> None:
    job = Job(client, clock, 0, 1, world_size=2)
    data = {"rule": "hang", "severity": "critical", "message": "No step for 90 s.", "since_step": 1}
    job.frame(2, 0, Event(kind="finding", time=1.0, step=1, data=data))
    (order,) = until(job.orders, why="nobody asked")
    assert (order["kind"], order["ranks"], order["who"], order["why"]) == ("stacks", None, "rule hang", data["message"])
    (alert,) = client.get("/api/v1/runs/r1/alerts").json()["alerts"]
    assert (order["rule"], order["alert"]) == ("hang", alert["id"])
    assert job.frame(2, 1) == [order["id"]]
    orders = services_of(client).orders
    clock.at += 299
    assert orders.ask("r1", "stacks", rule="hang", why="no step for 91 s") is None
    clock.at += 1
    job.frame(3)
    assert orders.ask("r1", "stacks", rule="hang", why="no step for 92 s") is not None


def test_what_cannot_be_asked_is_refused_with_what_can(job: Job) -> None:
    whole = "a whole number from 1 to 100"
    for body, says in (
        ({}, "kind is missing"),
        ({"kind": "reboot"}, "allowed are profile, stacks, flush, sampling"),
        ({"kind": ["profile"]}, "allowed are profile"),
        *(({"kind": "profile", "steps": steps}, whole) for steps in (0, 101, 2.5, 10**400, True)),
        ({"kind": "sampling", "sample_s": 10**400}, "a number from 0.5 to 3600"),
        ({"kind": "profile", "speed": 1}, "no parameter 'speed'; it takes steps"),
        ({"kind": "profile", "shapes": "yes"}, "true or false"),
        ({"kind": "stacks", "steps": 3}, "it takes none but ranks"),
        ({"kind": "sampling"}, "overhead_budget_pct, sample_s"),
        *(({"kind": "stacks", "ranks": ranks}, "a list of whole numbers") for ranks in ([], [-1])),
    ):
        answer = job.post(**body)
        assert (answer.status_code, says in answer.json()["error"]["message"]) == (422, True), body
    said = job.refusal(kind="stacks", ranks=[5])
    assert "rank 5 is not in this run" in said
    assert job.orders() == []


@pytest.mark.sql
def test_who_has_ended_is_lost_or_logs_alone_is_asked_nothing(client: TestClient, clock: Clock) -> None:
    job = Job(client, clock, 0, 1, world_size=3)
    clock.at += 60
    assert job.ask("flush")["asked"][0]["problem"] == "", "twelve signs of life may be late"
    clock.at += 1
    assert "rank 0 is silent (last heard 61 s ago)" in job.refusal(kind="profile"), "before it is called lost"
    clock.at += 179
    job.lose(0, 1)
    said = job.refusal(kind="stacks", ranks=[0, 1])
    assert "ranks 0, 1 are lost (last heard 4 min ago)" in said and "whether the process lives" in said
    assert "rank 2 is lost." in job.refusal(kind="stacks", ranks=[2]), "it was never heard of"
    run = client.post("/api/v1/log", json={"run": "curl", "metrics": {"loss": 1.0}}).json()["run"]
    for body in ({"kind": "stacks"}, {"kind": "stacks", "ranks": [0]}):
        said = job.refusal(run=run, **body)
        assert "rank 0 logs over HTTP" in said and "perfagent.attach()" in said
    for rank in (0, 1):
        assert job.frame(2, rank, state("finished")) == [], "its process is about to be gone"
    assert "has ended (finished)" in job.refusal(kind="stacks")
    assert (len(job.orders()), job.orders(run)) == (1, [])


@pytest.mark.sql
def test_who_can_answer_is_asked_and_of_others_is_told_why(client: TestClient, clock: Clock) -> None:
    job = Job(client, clock, 0, 1, 2, world_size=5)
    heard = clock.at
    job.lose(1)
    clock.at += 300
    job.frame(2, 0)
    job.frame(2, 2, state("finished"))
    client.post("/api/v1/log", json={"project": "p", "run": "r1", "metrics": {"x": 1.0}, "rank": 4})
    order = job.ask("stacks", ranks=[0, 1, 2, 3, 4])
    asked = {one["rank"]: one for one in order["asked"]}
    assert {rank: (one["state"], one["problem"]) for rank, one in asked.items()} == {
        0: ("running", ""), 1: ("lost", "lost"), 2: ("finished", "ended"), 3: (None, ""), 4: (asked[4]["state"], "no_agent"),
    }  # fmt: skip
    assert (asked[1]["heard"], asked[3]["heard"]) == (rfc3339(heard), None), "the one not heard of may still come"
    assert job.orders()[0]["asked"] == order["asked"]
    assert [one["rank"] for one in job.ask("stacks")["asked"]] == [0, 1, 2, 4], "all that were heard"
    said = job.refusal(kind="stacks", ranks=[1, 2])
    assert re.search(r"rank 2 has ended \(last heard \d s ago\); rank 1 is lost \(last heard 5 min ago\)", said), said


PROFILES = "/api/v1/runs/r1/profiles"


def profile_events(trace: bytes, *, identity: str = "ab12", piece: int = 100, **summary: Any) -> list[Event]:
    pieces = [trace[at : at + piece] for at in range(0, len(trace), piece)]
    about = {"profile": identity, "parts": len(pieces)}
    datas = [{**about, "command": "cm_1", "first_step": 3, "last_step": 7, **summary}]
    datas += [{**about, "part": number, "payload": content} for number, content in enumerate(pieces, 1)]
    return [Event(kind="profile", time=1.0, step=7, data=data) for data in datas]


def listed(job: Job) -> list[tuple[str, str, str]]:
    profiles = job.client.get(PROFILES).json()["profiles"]
    return [(one["id"], one["trace"], one["note"]) for one in profiles]


@pytest.mark.sql
def test_what_became_of_it_is_shown(client: TestClient, clock: Clock) -> None:
    job = Job(client, clock, 0, 1, world_size=2)
    order = job.ask("profile", ranks=[0, 1])["id"]
    for rank in (0, 1):
        job.frame(2, rank)
    job.frame(3, 0, answered(order, "done"))
    job.frame(3, 1, answered(order, "refused", why={"key": "under_way"}))
    job.frame(4, 0, answered(order, "accepted"))  # however late: done stays done
    (shown,) = job.orders()
    assert shown["state"] == "refused"
    sources = [(one["rank"], one["state"], one["message"]) for one in shown["sources"]]
    assert sources == [(0, "done", ""), (1, "refused", reason_words({"key": "under_way"}))]
    chinese = client.get("/api/v1/runs/r1/commands", headers={"Accept-Language": "zh"}).json()["commands"][0]
    assert chinese["sources"][1]["message"] == reason_words({"key": "under_way"}, "zh")


@pytest.mark.parametrize(("answer", "after_s"), [(None, 600.0), ("accepted", 1200.0)])
def test_what_a_process_was_given_and_never_did_expires(job: Job, answer: str | None, after_s: float) -> None:
    """It was killed before it could say a word."""
    order = job.ask("profile")["id"]
    job.frame(2)
    if answer is not None:
        job.frame(3, 0, answered(order, answer))
    for later_s, known in ((after_s - 1.0, answer or "handed"), (2.0, "expired")):
        job.clock.at += later_s
        assert job.orders()[0]["state"] == known
    job.frame(4, 0, answered(order, "done"))
    assert job.orders()[0]["state"] == "done", "its spool was found"


@pytest.mark.sql
def test_a_trace_that_comes_in_pieces_is_downloaded_whole(job: Job) -> None:
    trace = gzip.compress(json.dumps({"traceEvents": [{"name": f"op{n}", "ts": n} for n in range(500)]}).encode())
    operators = [{"name": f"op{n}", "calls": n, "self_cpu_s": 1, "total_cpu_s": 2.5} for n in range(9)]
    *events, last = profile_events(trace, operators=operators)
    job.frame(2, 0, *reversed(events))  # in any order
    (shown,) = job.client.get(PROFILES).json()["profiles"]
    assert (shown["trace"], shown["first_step"], len(shown["operators"])) == ("arriving", 3, 5)
    assert job.client.get(f"{PROFILES}/ab12").status_code == 409
    job.frame(3, 0, last)
    answer = job.client.get(f"{PROFILES}/ab12")
    assert (answer.headers["content-type"], answer.content == trace) == ("application/gzip", True)
    assert len(job.client.get(f"{PROFILES}/ab12/operators").json()["operators"]) == 9
    events_shown = job.client.get("/api/v1/runs/r1/events", params={"kind": "profile"}).json()["events"]
    assert len(events_shown) == 1, "pieces are no events"
    assert job.client.get(f"{PROFILES}/nothere").status_code == 404


def test_a_trace_whose_process_is_gone_comes_with_its_spool(job: Job) -> None:
    *events, last = profile_events(b"x" * 300)
    job.frame(2, 0, *events)
    job.frame(3, 0, state("killed"))
    assert listed(job) == [("ab12", "none", "its process ended (killed) before the trace was sent")]
    job.frame(4, 0, last)  # sent by who finds it on the disk
    assert listed(job) == [("ab12", "complete", "")]


def test_why_a_profile_has_no_trace_is_said(job: Job) -> None:
    why = {"key": "trace_too_large", "bytes": 2**27, "most_bytes": 2**26}
    told: tuple[dict[str, Any], ...] = (
        {"profile": "a1", "no_trace": why},
        {"profile": "b2", "trace_left_out": "too large"},
    )
    job.frame(2, 0, *(Event(kind="profile", time=1.0, step=7, data=data) for data in told))
    assert set(listed(job)) == {("a1", "none", reason_words(why)), ("b2", "none", "too large")}


@pytest.mark.fault
def test_x03_odd_profiles_cost_the_frame_nothing(job: Job) -> None:
    """The header that names the file of the trace is ASCII: a trace of another id was stored and could not be had."""
    odd: list[dict[str, Any]] = [
        {"profile": "../x", "part": 1, "payload": b"x"}, {"profile": "ok", "part": 10**6, "payload": b"x"},
        {"profile": "ok", "part": 1, "payload": "text"}, {"profile": "ok", "part": 1, "payload": b"x" * 2**21},
        {"profile": 7}, {"profile": "ok", "parts": "many", "operators": "none"}, {"profile": "ok", "no_trace": {"key": {}}},
    ]  # fmt: skip
    job.frame(2, 0, *(Event(kind="profile", time=float("nan"), data=data) for data in odd))
    assert job.client.get("/api/v1/runs/r1").json()["step"] == 2
    before = listed(job)
    assert all(trace == "none" for _, trace, _ in before)
    for seq, identity in enumerate(["日本", "ab12٣", "ab/12", "", "good1"], 20):
        job.frame(seq, 0, *profile_events(b"x" * 300, identity=identity))
    assert set(listed(job)) - set(before) == {("good1", "complete", "")}
    assert job.client.get(f"{PROFILES}/good1").status_code == 200


@pytest.mark.sql
def test_stacks_are_grouped_so_that_the_odd_rank_stands_out(client: TestClient, clock: Clock) -> None:
    job = Job(client, clock, 0, 1, 2, world_size=3)
    for rank, where in ((0, "all_reduce"), (1, "all_reduce"), (2, "load_batch")):
        threads = [{"name": "MainThread", "training": True, "frames": ["train.py:1 in main", f"x.py:2 in {where}"]}]
        told = {"command": "cm_9", "threads": threads}
        job.frame(2, rank, Event(kind="stacks", time=2.0, step=4, data=told))
    answer = client.get("/api/v1/runs/r1/stacks").json()
    assert [one["rank"] for one in answer["stacks"]] == [0, 1, 2]
    groups = [(group["ranks"], group["frames"][-1]) for group in answer["groups"]]
    assert groups == [([2], "x.py:2 in load_batch"), ([0, 1], "x.py:2 in all_reduce")]
    assert client.get("/api/v1/runs/r1/stacks", params={"command": "cm_other"}).json()["stacks"] == []
