from __future__ import annotations

import json
from typing import Any

import pytest
from frames import BEGIN, frame, rows, state
from sqlalchemy import select
from sqlite_calls import sqlite_calls

from perfagent.wire import Event
from perfagent_server.runs.run_queries import Runs
from perfagent_server.store import tables
from perfagent_server.store.write.lifecycle import JSON_SOURCE, mark_lost
from perfagent_server.timestamps import rfc3339


def run_of(shelf, run: str = "r1") -> dict[str, Any]:
    with shelf.database.read() as connection:
        return dict(connection.execute(select(tables.run).where(tables.run.c.id == run)).mappings().one())


def sources_of(shelf) -> list[dict[str, Any]]:
    """Rows of all sources, by rank."""
    with shelf.database.read() as connection:
        return [
            dict(row) for row in connection.execute(select(tables.source).order_by(tables.source.c.rank)).mappings()
        ]


def steps(*done: int, rank_name: str = "step_time_s"):
    return rows({rank_name: [0.1] * len(done)}, list(done))


def test_a_run_is_starting_then_running_then_finished(shelf) -> None:
    shelf.append(
        frame(
            1,
            state(
                "starting",
                name="gpt",
                config={"lr": float("nan")},
                tags=["a"],
                group="g",
                world_size=2,
                host="h",
                python="3.11",
            ),
        )
    )
    run = run_of(shelf)
    assert (run["state"], run["name"], run["world_size"], run["group_name"], run["host"]) == (
        "starting",
        "gpt",
        2,
        "g",
        "h",
    )
    assert json.loads(run["config"]) == {"lr": "NaN"}
    assert json.loads(run["meta"]) == {"python": "3.11"}
    assert json.loads(run["tags"]) == ["a"]
    shelf.append(frame(2, state("running"), steps(1, 2)), now=BEGIN + 1)
    assert (run_of(shelf)["state"], run_of(shelf)["step"]) == ("running", 2)
    shelf.append(frame(3, state("finished", time=BEGIN + 9, step=3)), now=BEGIN + 10)
    run = run_of(shelf)
    assert (run["state"], run["step"], run["ended"], run["updated"]) == ("finished", 3, BEGIN + 9, BEGIN + 10)


def test_a_run_is_finished_when_every_rank_that_reported_has_finished(shelf) -> None:
    shelf.append(*(frame(1, state("running"), rank=rank) for rank in range(3)))
    for rank in range(3):
        assert run_of(shelf)["state"] == "running"
        shelf.append(frame(2, state("finished"), rank=rank))
    assert run_of(shelf)["state"] == "finished"


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_the_first_failure_names_the_cause_whatever_arrives_first(shelf, order: tuple[int, ...]) -> None:
    reports = {
        0: state("preempted", time=BEGIN + 5, reason="SIGTERM"),
        1: state("failed", time=BEGIN + 4, reason="ValueError: bad batch"),
        2: state("killed", time=BEGIN + 35, reason="SIGKILL"),
    }
    shelf.append(*(frame(1, state("running"), rank=rank) for rank in range(3)))
    for rank in order:
        shelf.append(frame(2, reports[rank], rank=rank))
    run = run_of(shelf)
    assert (run["state"], run["reason"], run["ended"]) == ("failed", "rank 1: ValueError: bad batch", BEGIN + 4)


def test_the_rank_that_only_lost_its_peer_does_not_name_the_cause(shelf) -> None:
    """The socket of a dead process is closed some milliseconds before its end is seen."""
    shelf.append(*(frame(1, state("running"), rank=rank) for rank in range(3)))
    lost = "RuntimeError: [pair.cc:537] Read error [127.0.0.1]:33976: Connection reset by peer"
    shelf.append(frame(2, state("failed", time=BEGIN + 4, reason=lost), rank=0))
    shelf.append(frame(2, state("preempted", time=BEGIN + 4.1, reason="SIGTERM"), rank=2))
    assert run_of(shelf)["reason"] == f"rank 0: {lost}", "nothing tells of another cause"
    shelf.append(frame(2, state("killed", time=BEGIN + 4.02, reason="killed by SIGKILL"), rank=1))
    assert (run_of(shelf)["state"], run_of(shelf)["reason"]) == ("killed", "rank 1: killed by SIGKILL")


def test_a_failure_after_finish_counts_and_a_second_finish_does_not(shelf) -> None:
    shelf.append(frame(1, state("running"), state("finished", time=BEGIN + 1)))
    shelf.append(frame(1, state("failed", time=BEGIN + 2, reason="exit code 3"), source="watcher"))
    assert (run_of(shelf)["state"], run_of(shelf)["reason"]) == ("failed", "exit code 3")
    shelf.append(frame(2, state("finished", time=BEGIN + 3), source="watcher"))
    assert run_of(shelf)["state"] == "failed"


def test_silence_is_lost_and_a_fresh_frame_brings_the_run_back(shelf) -> None:
    shelf.append(frame(1, state("running"), steps(1), sent=BEGIN), frame(1, state("running"), rank=1, sent=BEGIN))
    silent = sources_of(shelf)
    assert {(row["run"], row["rank"], row["contact"]) for row in silent} == {("r1", 0, BEGIN), ("r1", 1, BEGIN)}
    assert all(row["heartbeat"] for row in silent)
    assert shelf.database.write(lambda connection: mark_lost(connection, [silent[0]["id"]])) == []
    heard = run_of(shelf)
    assert heard["state"] == "running"  # one rank is still in contact
    assert shelf.database.write(lambda connection: mark_lost(connection, [silent[1]["id"]])) == ["r1"]
    assert (run_of(shelf)["state"], run_of(shelf)["updated"]) == ("lost", heard["updated"])
    shelf.append(frame(2, steps(2), sent=BEGIN + 40), now=BEGIN + 40)
    assert run_of(shelf)["state"] == "running"


def test_a_spool_found_later_does_not_bring_a_lost_run_back(shelf) -> None:
    shelf.append(frame(1, state("running"), steps(1), sent=BEGIN))
    shelf.database.write(lambda connection: mark_lost(connection, ["r1-1-0"]))
    shelf.append(frame(2, steps(2), sent=BEGIN + 1), now=BEGIN + 3600)
    assert (run_of(shelf)["state"], run_of(shelf)["step"]) == ("lost", 2)


@pytest.mark.parametrize("said", [(), (state("running"),), (state("starting"),)], ids=["rows", "running", "starting"])
def test_what_another_process_sends_brings_no_lost_run_back_and_no_time(shelf, said: tuple[Event, ...]) -> None:
    shelf.append(frame(1, state("running"), steps(1), sent=BEGIN + 1), now=BEGIN + 1)
    shelf.database.write(lambda connection: mark_lost(connection, ["r1-1-0"]))
    late = frame(2, *said, steps(8), sent=BEGIN + 46, relayed=True)
    shelf.append(late, now=BEGIN + 46)
    assert (run_of(shelf)["state"], run_of(shelf)["step"]) == ("lost", 8)
    shown = Runs(shelf.database).get("r1")
    assert shown.updated == rfc3339(BEGIN + 2), "it was alive when it measured this, and not when it came"
    (row,) = Runs(shelf.database).rows(["r1"]).values()
    assert row["updated"] == shown.updated
    shelf.append(frame(3, state("failed", time=BEGIN + 900), sent=BEGIN + 46, relayed=True), now=BEGIN + 1000)
    assert (run_of(shelf)["state"], run_of(shelf)["ended"]) == ("failed", BEGIN + 900)


def test_a_killed_run_that_is_only_heard_of_later_lived_as_long_as_its_frames_say(shelf) -> None:
    shelf.append(frame(1, state("running"), steps(4), sent=BEGIN + 9000, relayed=True), now=BEGIN + 9000)
    shelf.database.write(lambda connection: mark_lost(connection, ["r1-1-0"]))
    shown = Runs(shelf.database).get("r1")
    assert (shown.started, shown.updated) == (rfc3339(BEGIN), rfc3339(BEGIN + 1))


def started(shelf, table=tables.run, **where: Any) -> float:
    with shelf.database.read() as connection:
        query = select(table.c.started).where(*(table.c[name] == value for name, value in where.items()))
        return float(connection.execute(query).scalar_one())


def test_a_run_that_comes_late_began_when_its_frames_say_and_not_when_they_came(shelf) -> None:
    late = BEGIN + 3600
    shelf.append(frame(1, state("starting", time=BEGIN + 1), steps(1, 2), sent=late), now=late)
    shelf.append(frame(2, steps(3), state("finished", time=BEGIN + 60), sent=late), now=late)
    run = run_of(shelf)
    assert (run["started"], run["ended"], run["updated"]) == (BEGIN + 0.25, BEGIN + 60, late)


def test_an_earlier_frame_that_comes_later_moves_the_start_back_and_a_later_one_does_not(shelf) -> None:
    shelf.append(frame(2, steps(40)), now=BEGIN + 20)
    assert run_of(shelf)["started"] == BEGIN + 10
    shelf.append(frame(1, state("running", time=BEGIN + 2)), now=BEGIN + 21)
    shelf.append(frame(3, steps(80)), now=BEGIN + 22)
    assert run_of(shelf)["started"] == BEGIN + 2
    assert started(shelf, tables.source, id="r1-1-0") == started(shelf, tables.attempt, run="r1") == BEGIN + 2


def test_each_attempt_has_its_own_start_and_the_run_that_of_the_first(shelf) -> None:
    for attempt, at in ((2, BEGIN + 100), (1, BEGIN)):  # the older one is found in a spool
        shelf.append(frame(1, state("starting", time=at), attempt=attempt), now=BEGIN + 200)
    assert [started(shelf, tables.attempt, attempt=attempt) for attempt in (1, 2)] == [BEGIN, BEGIN + 100]
    assert run_of(shelf)["started"] == BEGIN


@pytest.mark.parametrize("off", [-7200.0, 7200.0], ids=["behind", "ahead"])
def test_times_of_a_wrong_clock_are_put_right(shelf, off: float) -> None:
    begun = state("starting", time=BEGIN + off)
    shelf.append(frame(1, begun, sent=BEGIN + 5 + off), now=BEGIN + 5)
    shelf.append(frame(2, state("finished", time=BEGIN + 60 + off), sent=BEGIN + 61 + off), now=BEGIN + 61)
    assert (run_of(shelf)["started"], run_of(shelf)["ended"]) == (BEGIN, BEGIN + 60)


@pytest.mark.parametrize("first", [100.0, BEGIN + 365 * 86_400, BEGIN - 365 * 86_400])
def test_a_clock_that_is_set_meanwhile_moves_neither_start_nor_end_out_of_what_was_heard(shelf, first: float) -> None:
    shelf.append(frame(1, state("starting", time=first), sent=first + 1), now=BEGIN + 1)
    shelf.append(frame(2, state("finished", time=BEGIN + 60), sent=BEGIN + 61), now=BEGIN + 61)
    run = run_of(shelf)
    assert BEGIN <= run["started"] <= BEGIN + 1
    assert run["started"] <= run["ended"] <= BEGIN + 61 + 60


@pytest.mark.parametrize("time", [float("nan"), float("-inf"), -1e300, 0.0, 9e10, float("inf")])
def test_a_time_that_cannot_be_says_nothing_of_the_start(shelf, time: float) -> None:
    shelf.append(frame(1, state("starting", time=time), rows({"x": [1.0]}, [1], [time]), sent=time), now=BEGIN)
    assert run_of(shelf)["started"] == BEGIN


def test_what_a_watcher_says_at_the_end_tells_when_its_script_began(shelf) -> None:
    shelf.append(frame(1, state("killed", time=BEGIN + 50, watcher=True, started=BEGIN)), now=BEGIN + 51)
    assert (run_of(shelf)["started"], run_of(shelf)["ended"]) == (BEGIN, BEGIN + 50)


def test_late_frames_do_not_revive_a_finished_run(shelf) -> None:
    shelf.append(frame(3, state("finished")))
    shelf.append(frame(1, state("starting")), frame(2, state("running"), steps(5)))
    assert (run_of(shelf)["state"], run_of(shelf)["step"]) == ("finished", 5)


def test_a_new_attempt_starts_the_run_again_and_old_reports_do_not_touch_it(shelf) -> None:
    shelf.append(frame(1, state("running"), steps(100), attempt=1))
    shelf.append(frame(2, state("failed", reason="x"), attempt=1))
    shelf.append(frame(1, state("starting", start_step=51), attempt=2), now=BEGIN + 60)
    run = run_of(shelf)
    assert (run["state"], run["step"], run["attempts"], run["ended"], run["reason"]) == ("starting", 50, 2, None, "")
    shelf.append(frame(3, steps(101), state("killed"), attempt=1), now=BEGIN + 61)
    assert (run_of(shelf)["state"], run_of(shelf)["step"]) == ("starting", 50)
    shelf.append(frame(2, state("running"), steps(51), attempt=2), now=BEGIN + 62)
    assert (run_of(shelf)["state"], run_of(shelf)["step"]) == ("running", 51)


def test_the_step_is_the_last_completed_one(shelf) -> None:
    in_progress = rows({"my/metric": [1.0], "gpu/power_w": [300.0]}, [9])
    shelf.append(frame(1, steps(7, 8), in_progress))
    assert run_of(shelf)["step"] == 8
    shelf.append(frame(2, rows({"my/metric": [1.0]}, [10])))  # logged during step 10
    assert run_of(shelf)["step"] == 8
    shelf.append(
        frame(1, rows({"acc": [0.5], "host/cpu_pct": [1.0]}, [4]), rows({"host/cpu_pct": [1.0]}, [5]), run="plain")
    )
    assert run_of(shelf, "plain")["step"] == 4  # a client that times no steps is taken at its word
    assert run_of(shelf, "plain")["state"] == "running"


def test_the_first_step_of_a_process_says_where_it_is_whatever_its_script_counts(shelf) -> None:
    first = rows({"loss": [1.0], "lr": [0.1], "phase/optimizer_s": [0.01]}, [1])
    shelf.append(frame(1, first, rows({"samples/score": [1.0]}, [4096])))
    assert run_of(shelf)["step"] == 1
    shelf.append(frame(2, rows({"samples/score": [1.0]}, [8192])))
    assert run_of(shelf)["step"] == 1


def test_only_rows_of_a_plain_client_come_without_signs_of_life(shelf) -> None:
    shelf.append(frame(1, rows({"acc": [0.5]}, [4])))
    shelf.append(frame(1, rows({"acc": [0.5]}, [4]), source=f"{JSON_SOURCE}1", rank=1))
    assert [row["heartbeat"] for row in sources_of(shelf)] == [True, False]


def test_a_configuration_that_json_cannot_hold_becomes_text(shelf) -> None:
    shelf.append(frame(1, state("starting", config={"raw": b"\x00\xff", "big": 2**62})))
    assert json.loads(run_of(shelf)["config"])["big"] == 2**62
    shelf.append(frame(1, state("starting", config={"x": "y" * 400_000}), run="r2"))
    assert "dropped" in json.loads(run_of(shelf, "r2")["config"])


def test_what_a_script_adds_later_is_added_and_a_new_attempt_keeps_the_name_of_the_run(shelf) -> None:
    shelf.append(
        frame(1, state("starting", name="train", config={"lr": 0.1}, tags=["a"], world_size=2, host="h", python="3.11"))
    )
    shelf.append(frame(2, state("running", name="gpt", config={"layers": 4}, tags=["a", "b"]), steps(1)))
    run = run_of(shelf)
    assert (run["name"], run["world_size"], run["host"]) == ("gpt", 2, "h")
    assert json.loads(run["config"]) == {"lr": 0.1, "layers": 4}
    assert json.loads(run["tags"]) == ["a", "b"]
    assert json.loads(run["meta"]) == {"python": "3.11"}
    shelf.append(frame(1, state("starting", name="train", config={"lr": 0.2}), source="again", attempt=2))
    run = run_of(shelf)
    assert (run["name"], run["attempts"]) == ("gpt", 2)
    assert json.loads(run["config"]) == {"lr": 0.2, "layers": 4}


def test_what_a_person_has_set_is_not_undone_by_the_job(shelf) -> None:
    shelf.append(frame(1, state("starting", name="train", tags=["wip"])))
    shelf.database.write(
        lambda connection: Runs.change(connection, "r1", name="mine", tags=["good"], notes=None, rules_off=None)
    )
    context = Event(kind="context", time=BEGIN, data={"packages": {"torch": "2"}, "_set_by_people": []})
    shelf.append(frame(2, context, state("starting", name="train", tags=["wip"]), name="train"))
    shelf.append(frame(1, state("starting", name="train", tags=["wip"]), attempt=2))
    run = Runs(shelf.database).get("r1")
    assert (run.name, run.tags, run.meta) == ("mine", ["good"], {"packages": {"torch": "2"}})


@pytest.mark.sqlite
@pytest.mark.parametrize("kind", ["context", "state"])
def test_what_the_frames_of_a_transaction_say_about_a_run_is_read_and_written_once(shelf, kind: str) -> None:
    """A config of 256 kB was read, parsed, joined and written for each of 20,000 events: 27 s on the writer thread."""

    def says(number: int) -> Event:
        described = {"config": {f"key {number}": number}, "tags": [f"tag {number % 3}"], f"meta {number}": number}
        return Event(kind=kind, time=BEGIN, data={**described, **({"state": "running"} if kind == "state" else {})})

    shelf.append(frame(1, state("starting", config={"lr": 0.1})))
    statements: list[str] = []
    watch = sqlite_calls(shelf.database, statements)
    shelf.append(frame(2, *map(says, range(40))), frame(3, *map(says, range(40, 80))))
    watch()
    on_config = [statement for statement in statements if "config" in statement and " run" in statement]
    assert len(on_config) == 2, "one SELECT and one UPDATE"
    run = run_of(shelf)
    assert json.loads(run["config"]) == {"lr": 0.1, **{f"key {number}": number for number in range(80)}}
    assert json.loads(run["tags"]) == ["tag 0", "tag 1", "tag 2"]
    assert json.loads(run["meta"]) == {f"meta {number}": number for number in range(80)}
