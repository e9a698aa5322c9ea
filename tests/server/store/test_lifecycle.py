"""What the row of a run says: its state, its end, its times, its step, and what it was started with."""

from __future__ import annotations

import json
from typing import Any

import pytest
from frames import BEGIN, frame, rows, state
from sqlalchemy import select

from perfagent.wire import Event
from perfagent_server.runs.run_queries import Runs
from perfagent_server.store import tables
from perfagent_server.store.write.lifecycle import mark_lost
from perfagent_server.timestamps import rfc3339


def run_of(shelf, run: str = "r1") -> dict[str, Any]:
    with shelf.database.read() as connection:
        return dict(connection.execute(select(tables.run).where(tables.run.c.id == run)).mappings().one())


def of(shelf, *names: str, run: str = "r1") -> list[Any]:
    """These columns of the run's row; JSON is read."""
    row = run_of(shelf, run)
    return [json.loads(row[name]) if name in ("config", "meta", "tags") else row[name] for name in names]


def steps(*done: int):
    return rows({"step_time_s": [0.1] * len(done)}, list(done))


def lose(shelf, *sources: str) -> list[str]:
    return shelf.database.write(lambda connection: mark_lost(connection, list(sources)))


def ranks_run(shelf, count: int, run: str = "r1") -> None:
    shelf.append(*(frame(1, state("running"), rank=rank, run=run) for rank in range(count)))


@pytest.mark.sql
def test_a_run_is_starting_then_running_then_finished(shelf) -> None:
    about = {"name": "gpt", "tags": ["a"], "group": "g", "world_size": 2, "host": "h", "python": "3.11"}
    shelf.append(frame(1, state("starting", config={"lr": float("nan")}, **about)))
    assert of(shelf, "state", "name", "world_size", "group_name", "host") == ["starting", "gpt", 2, "g", "h"]
    assert of(shelf, "config", "meta", "tags") == [{"lr": "NaN"}, {"python": "3.11"}, ["a"]]
    shelf.append(frame(2, state("running"), steps(1, 2)), now=BEGIN + 1)
    assert of(shelf, "state", "step") == ["running", 2]
    shelf.append(frame(3, state("finished", time=BEGIN + 9, step=3)), now=BEGIN + 10)
    assert of(shelf, "state", "step", "ended", "updated") == ["finished", 3, BEGIN + 9, BEGIN + 10]
    shelf.append(frame(4, state("starting")), frame(5, state("running"), steps(5)))  # late
    assert of(shelf, "state", "step") == ["finished", 5]


LOST = "RuntimeError: [pair.cc:537] Read error [127.0.0.1]:33976: Connection reset by peer"


ENDS = {
    0: state("preempted", time=BEGIN + 5, reason="SIGTERM"),
    1: state("failed", time=BEGIN + 4, reason="ValueError: bad batch"),
    2: state("killed", time=BEGIN + 35, reason="SIGKILL"),
    3: state("failed", time=BEGIN + 3.99, reason=LOST),  # its socket is closed before the end of the other is seen
}


@pytest.mark.parametrize("order", [(0, 1, 2), (3, 0, 2, 1), (1, 2, 0)])
def test_the_first_failure_names_the_cause(shelf, order: tuple[int, ...]) -> None:
    ranks_run(shelf, len(order))
    for rank in order:
        shelf.append(frame(2, ENDS[rank], rank=rank))
    assert of(shelf, "state", "reason") == ["failed", '{"key": "of_rank", "rank": 1, "why": "ValueError: bad batch"}']
    ranks_run(shelf, 2, run="well")
    for rank in range(2):
        assert of(shelf, "state", run="well") == ["running"]
        shelf.append(frame(2, state("finished"), rank=rank, run="well"))
    assert of(shelf, "state", run="well") == ["finished"], "when every rank heard has"


@pytest.mark.sql
def test_a_new_attempt_starts_the_run_again(shelf) -> None:
    shelf.append(frame(1, state("running"), steps(100)), frame(2, state("failed", reason="x")))
    shelf.append(frame(1, state("starting", start_step=51), attempt=2), now=BEGIN + 60)
    assert of(shelf, "state", "step", "attempts", "ended", "reason") == ["starting", 50, 2, None, ""]
    shelf.append(frame(3, steps(101), state("killed")), now=BEGIN + 61)  # an old report
    assert of(shelf, "state", "step") == ["starting", 50]
    shelf.append(frame(2, state("running"), steps(51), attempt=2), now=BEGIN + 62)
    assert of(shelf, "state", "step") == ["running", 51]


@pytest.mark.sql
def test_silence_is_lost_and_a_fresh_frame_brings_the_run_back(shelf) -> None:
    shelf.append(frame(1, state("running"), steps(1), sent=BEGIN), frame(1, state("running"), rank=1, sent=BEGIN))
    source = tables.source.c
    heard = shelf.ask(select(source.run, source.rank, source.contact, source.heartbeat).order_by(source.rank))
    assert heard == [("r1", 0, BEGIN, True), ("r1", 1, BEGIN, True)]
    assert lose(shelf, "r1-1-0") == []
    assert of(shelf, "state") == ["running"]  # one rank is still in contact
    assert lose(shelf, "r1-1-1") == ["r1"]
    assert of(shelf, "state", "updated") == ["lost", BEGIN]
    shelf.append(frame(2, steps(2), sent=BEGIN + 1), now=BEGIN + 3600)  # a spool found later
    assert of(shelf, "state", "step") == ["lost", 2]
    shelf.append(frame(3, steps(3), sent=BEGIN + 3601), now=BEGIN + 3601)
    assert of(shelf, "state") == ["running"]


@pytest.mark.parametrize("said", [(), (state("starting"),)], ids=["rows", "starting"])
def test_what_another_process_relays_revives_no_lost_run(shelf, said: tuple[Event, ...]) -> None:
    shelf.append(frame(1, state("running"), steps(1), sent=BEGIN + 1), now=BEGIN + 1)
    lose(shelf, "r1-1-0")
    shelf.append(frame(2, *said, steps(8), sent=BEGIN + 46, relayed=True), now=BEGIN + 46)
    assert of(shelf, "state", "step") == ["lost", 8]
    shown = Runs(shelf.database).get("r1")
    assert shown.updated == rfc3339(BEGIN + 2), "it was alive when it measured this, and not when it came"
    shelf.append(frame(3, state("failed", time=BEGIN + 900), sent=BEGIN + 46, relayed=True), now=BEGIN + 1000)
    assert of(shelf, "state", "ended") == ["failed", BEGIN + 900]


def test_a_run_began_when_its_frames_say_and_not_when_they_came(shelf) -> None:
    late = BEGIN + 3600
    shelf.append(frame(1, state("starting", time=BEGIN + 1), steps(1, 2), sent=late), now=late)
    shelf.append(frame(2, steps(3), state("finished", time=BEGIN + 60), sent=late), now=late)
    assert of(shelf, "started", "ended", "updated") == [BEGIN + 0.25, BEGIN + 60, late]
    shelf.append(frame(1, state("killed", time=BEGIN + 50, watcher=True, started=BEGIN), run="seen"), now=late)
    assert of(shelf, "started", "ended", run="seen") == [BEGIN, BEGIN + 50], "as its watcher says at the end"


@pytest.mark.parametrize("off", [-7200.0, 7200.0], ids=["behind", "ahead"])
def test_times_of_a_wrong_clock_are_put_right(shelf, off: float) -> None:
    shelf.append(frame(1, state("starting", time=BEGIN + off), sent=BEGIN + 5 + off), now=BEGIN + 5)
    shelf.append(frame(2, state("finished", time=BEGIN + 60 + off), sent=BEGIN + 61 + off), now=BEGIN + 61)
    assert of(shelf, "started", "ended") == [BEGIN, BEGIN + 60]


def test_the_step_is_the_last_completed_one(shelf) -> None:
    in_progress = rows({"my/metric": [1.0], "gpu/power_w": [300.0]}, [9])
    shelf.append(frame(1, steps(7, 8), in_progress), frame(2, rows({"my/metric": [1.0]}, [10])))
    assert of(shelf, "step") == [8]
    plain = rows({"acc": [0.5], "host/cpu_pct": [1.0]}, [4]), rows({"host/cpu_pct": [1.0]}, [5])
    shelf.append(frame(1, *plain, run="plain"))
    assert of(shelf, "step", "state", run="plain") == [4, "running"]  # who times no steps is taken at their word
    first = rows({"loss": [1.0], "lr": [0.1], "phase/optimizer_s": [0.01]}, [1])
    shelf.append(frame(1, first, rows({"samples/score": [1.0]}, [4096]), run="odd"))
    assert of(shelf, "step", run="odd") == [1], "whatever its script counts"


@pytest.mark.sql
def test_what_a_script_adds_later_is_added(shelf) -> None:
    about = {"tags": ["a"], "world_size": 2, "host": "h", "python": "3.11"}
    shelf.append(frame(1, state("starting", name="train", config={"lr": 0.1}, **about)))
    shelf.append(frame(2, state("running", name="gpt", config={"layers": 4}, tags=["a", "b"]), steps(1)))
    assert of(shelf, "name", "world_size", "host", "tags") == ["gpt", 2, "h", ["a", "b"]]
    assert of(shelf, "config", "meta") == [{"lr": 0.1, "layers": 4}, {"python": "3.11"}]
    shelf.append(frame(1, state("starting", name="train", config={"lr": 0.2}), source="again", attempt=2))
    assert of(shelf, "name", "attempts", "config") == ["gpt", 2, {"lr": 0.2, "layers": 4}]


@pytest.mark.sql
def test_what_a_person_has_set_is_not_undone_by_the_job(shelf) -> None:
    started = state("starting", name="train", tags=["wip"])
    shelf.append(frame(1, started))
    change = {"name": "mine", "tags": ["good"], "notes": None, "rules_off": None}
    shelf.database.write(lambda connection: Runs.change(connection, "r1", **change))
    context = Event(kind="context", time=BEGIN, data={"packages": {"torch": "2"}, "_set_by_people": []})
    shelf.append(frame(2, context, started, name="train"), frame(1, started, attempt=2))
    run = Runs(shelf.database).get("r1")
    assert (run.name, run.tags, run.meta) == ("mine", ["good"], {"packages": {"torch": "2"}})
