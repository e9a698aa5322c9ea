"""perfagent stacks and profile, where somebody does not answer: nobody is waited for who cannot."""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pytest
from api_builders import Listening, frame, listening
from builders import until, web
from frames import state
from sqlalchemy import update

from perfagent.errors import PerfagentError
from perfagent.wire import Event
from perfagent_client import root_cause
from perfagent_client.client import ApiError
from perfagent_server.store.tables import source
from perfagent_server.store.write.lifecycle import mark_lost

pytestmark = pytest.mark.real

FOR_EVER = ("--wait", "600")
"""Longer than the time limit of a test: a test that passes did not wait for a rank that cannot answer."""


@dataclass
class Job:
    """A run as its agents would tell of it."""

    server: Listening
    name: str
    seq: int = 1

    def send(self, rank: int, *events: Event) -> None:
        values = {"loss": [1.0]}
        self.server.take(frame(values, run=self.name, rank=rank, seq=self.seq, first_step=self.seq, events=events))
        self.seq += 1

    def start(self, *ranks: int, world_size: int) -> None:
        for rank in ranks:
            self.send(rank, state("starting", world_size=world_size))

    def asked(self) -> dict[str, Any]:
        """The command, once it is there."""
        url = f"{self.server.url}/api/v1/runs/{self.name}/commands"
        found: dict[str, Any] = until(lambda: web().get(url).json()["commands"], why="nobody asked")[0]
        return found

    def answer(self, rank: int) -> None:
        """As an agent that is asked for stacks."""
        identity = self.asked()["id"]
        self.send(rank)  # its answer hands the command out
        threads = [{"name": "MainThread", "training": True, "frames": [f"train.py:1 in rank_{rank}"]}]
        said = Event(kind="stacks", time=2.0, step=1, data={"command": identity, "threads": threads})
        done = Event(kind="command", time=2.0, data={"command": identity, "kind": "stacks", "state": "done"})
        self.send(rank, said, done)

    def refuse(self, rank: int, why: str) -> None:
        identity = self.asked()["id"]
        self.send(rank)
        self.send(rank, Event(kind="command", time=2.0, data={"command": identity, "state": "refused", "message": why}))

    def lose(self, rank: int, *, heard: float) -> None:
        here = update(source).where(source.c.id == f"{self.name}-1-{rank}").values(contact=heard)
        write = self.server.app.state.services.database.write
        write(lambda connection: connection.execute(here))
        write(lambda connection: mark_lost(connection, [f"{self.name}-1-{rank}"]))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Listening]:
    with listening(tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture
def job(server: Listening, request: pytest.FixtureRequest) -> Job:
    return Job(server, request.node.name.replace("_", "-")[:60])


def run(command: Callable[[argparse.ArgumentParser], None], job: Job, *words: str) -> int:
    parser = argparse.ArgumentParser()
    command(parser)
    arguments = parser.parse_args([job.name, "--server", job.server.url, *FOR_EVER, *words])
    code: int = arguments.run(arguments)
    return code


def meanwhile(*does: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=lambda: [one() for one in does])
    thread.start()
    return thread


@pytest.mark.parametrize("command", [root_cause.stacks, root_cause.profile])
def test_who_cannot_answer_is_told_at_once(job: Job, command: Any) -> None:
    job.start(0, world_size=1)
    job.lose(0, heard=time.time() - 240)
    with pytest.raises(ApiError, match=r"rank 0 is lost \(last heard 4 min ago\)"):
        run(command, job)
    job.name += "-curl"
    body = {"run": job.name, "metrics": {"loss": 1.0}}
    web().post(f"{job.server.url}/api/v1/log", json=body).raise_for_status()
    with pytest.raises(ApiError, match="rank 0 logs over HTTP, without an agent"):
        run(command, job)


def test_what_came_is_shown_and_who_is_silent_is_named(job: Job, capsys: Any) -> None:
    job.start(0, 1, 2, world_size=3)
    heard = time.time() - 3600
    job.lose(2, heard=heard)
    ending = meanwhile(lambda: job.answer(0), lambda: job.send(1, state("killed", reason="signal 9")))
    code = run(root_cause.stacks, job, "--json")
    ending.join()
    told = capsys.readouterr()
    shown = json.loads(told.out)
    assert code == 1
    assert [one["rank"] for one in shown["stacks"]] == [0]
    assert {(one["rank"], one["problem"]) for one in shown["silent"]} == {(1, "ended"), (2, "lost")}
    ended, lost = sorted(told.err.splitlines())
    assert ended.startswith("rank 1: ended (killed), last heard at ")
    assert lost.startswith("rank 2: not heard since ")
    assert lost.endswith(datetime.fromtimestamp(heard, UTC).astimezone().strftime("%H:%M"))


def test_when_all_have_answered_the_exit_code_is_zero(job: Job, capsys: Any) -> None:
    job.start(0, 1, world_size=2)
    answering = meanwhile(lambda: job.answer(0), lambda: job.answer(1))
    code = run(root_cause.stacks, job)
    answering.join()
    told = capsys.readouterr()
    assert (code, told.err) == (0, "")
    assert told.out.startswith("rank 0\n    train.py:1 in rank_0\n")
    assert "rank 1\n    train.py:1 in rank_1" in told.out


def test_a_stop_that_rank_0_refuses_waits_for_no_other(job: Job) -> None:
    job.start(0, 1, world_size=2)
    refusing = meanwhile(lambda: job.refuse(0, "not stoppable: say so"))
    with pytest.raises(PerfagentError, match="refused: not stoppable: say so"):
        run(root_cause.stop, job)
    refusing.join()


@pytest.mark.parametrize(
    ("command", "gone", "says"),
    [
        (root_cause.stacks, "oom", r"no rank has answered: the run has ended \(oom\)"),
        (root_cause.profile, "failed", r"the profile was not taken, the run has ended \(failed\): rank 0: ended"),
        (root_cause.profile, "lost", "the profile was not taken, the run is lost: rank 0: not heard since"),
    ],
)
def test_nobody_waits_for_a_training_that_is_gone(job: Job, command: Any, gone: str, says: str) -> None:
    job.start(0, world_size=1)

    def go() -> None:
        job.asked()
        if gone == "lost":
            job.lose(0, heard=time.time() - 90)
        else:
            job.send(0, state(gone, reason="no more"))

    going = meanwhile(go)
    with pytest.raises(PerfagentError, match=says):
        run(command, job)
    going.join()


def test_profiles_are_listed_and_shown_by_a_beginning_of_an_id(job: Job, capsys: Any) -> None:
    job.start(0, world_size=1)
    assert run(root_cause.profile, job, "--list") == 0
    assert capsys.readouterr().out == "no profiles; without --list one is taken\n"
    says = ["Of 500 ms for 2 steps, the host spent 80 % in the data loader.", "Copies took 3 ms."]
    longest = [{"s": 0.2, "after": "aten::mm", "before": "aten::stack", "at_s": 0.0}]
    gaps = {"of": "operators", "busy_s": 0.1, "idle_s": 0.4, "idle_pct": 80.0, "longest": longest}
    operators = [{"name": "aten::mm", "calls": 4, "self_cpu_s": 0.05, "total_cpu_s": 0.06}]
    first = {
        "profile": "ab12cd34ef56ab78",
        "command": "cm_1",
        "first_step": 3,
        "last_step": 4,
        "duration_s": 0.5,
        "parts": 0,
    }
    shares = {"steps_s": 0.5, "loader_s": 0.4}
    second = {**first, "profile": "ab99", "shares": shares, "says": says, "gaps": gaps, "operators": operators}
    job.send(0, *(Event(kind="profile", time=at, step=4, data=data) for at, data in ((2.0, first), (3.0, second))))
    assert run(root_cause.profile, job, "--list") == 0
    head, newest, older = capsys.readouterr().out.splitlines()
    assert head.split() == ["ID", "TAKEN", "RANK", "STEPS", "BECAUSE", "OF", "TRACE", "WHAT", "IT", "SHOWS"]
    assert newest.startswith("ab99 ") and newest.endswith("80 % in the data loader.")
    assert older.startswith("ab12cd34ef56 ")
    assert run(root_cause.profile, job, "--show", "ab9") == 0
    shown = capsys.readouterr().out
    assert shown.startswith("rank 0, steps 3 to 4, 0.5 s, outside of operators 80 % of the time\n  Of 500 ms for 2 ")
    assert "Longest gaps between operators: 200 ms after aten::mm, before aten::stack." in shown
    assert "aten::mm      4       50.000        60.000" in shown
    assert run(root_cause.profile, job, "--list", "--json") == 0
    assert [one["id"] for one in json.loads(capsys.readouterr().out)["profiles"]] == ["ab99", "ab12cd34ef56ab78"]
    for beginning, refused in (("ab", "has 2 profiles"), ("x", "has no profile")):
        with pytest.raises(PerfagentError, match=f"{refused} whose id begins with '{beginning}'"):
            run(root_cause.profile, job, "--show", beginning)
