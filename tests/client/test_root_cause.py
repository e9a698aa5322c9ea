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
from clocks import SteppedClock
from frames import state
from sqlalchemy import update

from perfagent.errors import PerfagentError
from perfagent.wire import Event, encode
from perfagent_client import root_cause
from perfagent_client.client import ApiError
from perfagent_server.store.tables import source
from perfagent_server.store.write.lifecycle import mark_lost

FOR_EVER = ("--wait", "600")
"""Longer than the time limit of a test: a test that passes did not wait for a rank that cannot answer."""


@dataclass
class Job:
    """A run as its agents would tell of it."""

    server: Listening
    name: str
    seq: int = 1

    def send(self, rank: int, *events: Event) -> None:
        sent = frame({"loss": [1.0]}, run=self.name, rank=rank, seq=self.seq, first_step=self.seq, events=events)
        self.seq += 1
        headers = {"Content-Type": "application/x-msgpack"}
        url = f"{self.server.url}/api/v1/ingest"
        web().post(url, content=encode(sent), headers=headers).raise_for_status()

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


def meanwhile(does: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=does)
    thread.start()
    return thread


@pytest.mark.parametrize("command", [root_cause.stacks, root_cause.profile])
def test_a_lost_run_is_told_at_once(job: Job, command: Any) -> None:
    job.start(0, world_size=1)
    job.lose(0, heard=time.time() - 240)
    with pytest.raises(ApiError, match=r"rank 0 is lost \(last heard 4 min ago\)"):
        run(command, job)


@pytest.mark.parametrize("command", [root_cause.stacks, root_cause.profile])
def test_a_run_without_an_agent_is_told_at_once(server: Listening, command: Any) -> None:
    name = f"curl-{command.__name__}"
    body = {"run": name, "metrics": {"loss": 1.0}}
    web().post(f"{server.url}/api/v1/log", json=body).raise_for_status()
    with pytest.raises(ApiError, match="rank 0 logs over HTTP, without an agent"):
        run(command, Job(server, name))


def test_what_came_before_the_run_ended_is_shown_and_the_others_are_named(job: Job, capsys: Any) -> None:
    job.start(0, 1, world_size=2)

    def end() -> None:
        job.answer(0)
        job.send(1, state("killed", reason="signal 9"))

    ending = meanwhile(end)
    code = run(root_cause.stacks, job)
    ending.join()
    told = capsys.readouterr()
    assert code == 1
    assert told.out.startswith("rank 0\n    train.py:1 in rank_0\n")
    assert told.err.startswith("rank 1: ended (killed), last heard at ")


def test_of_several_runs_of_one_name_the_newest_is_asked_and_that_is_said(server: Listening, capsys: Any) -> None:
    for _ in range(2):
        body = {"run": "twice", "state": "starting", "metrics": {"loss": 1.0}}
        web().post(f"{server.url}/api/v1/log", json=body).raise_for_status()
    with pytest.raises(ApiError, match="without an agent"):
        run(root_cause.stacks, Job(server, "twice"))
    assert "2 runs are named 'twice'; this is the newest" in capsys.readouterr().err


def test_a_rank_that_is_lost_is_not_waited_for(job: Job, capsys: Any) -> None:
    job.start(0, 1, world_size=2)
    heard = time.time() - 3600
    job.lose(1, heard=heard)
    answering = meanwhile(lambda: job.answer(0))
    code = run(root_cause.stacks, job, "--json")
    answering.join()
    told = capsys.readouterr()
    shown = json.loads(told.out)
    assert code == 1
    assert [one["rank"] for one in shown["stacks"]] == [0]
    assert [(one["rank"], one["problem"]) for one in shown["silent"]] == [(1, "lost")]
    assert told.err.rstrip().endswith(datetime.fromtimestamp(heard, UTC).astimezone().strftime("%H:%M"))
    assert told.err.startswith("rank 1: not heard since ")


def test_when_all_have_answered_the_exit_code_is_zero(job: Job, capsys: Any) -> None:
    job.start(0, 1, world_size=2)

    def answer() -> None:
        job.answer(0)
        job.answer(1)

    answering = meanwhile(answer)
    code = run(root_cause.stacks, job)
    answering.join()
    told = capsys.readouterr()
    assert (code, told.err) == (0, "")
    assert "rank 1\n    train.py:1 in rank_1" in told.out


def test_a_rank_that_never_came_is_named_when_the_time_is_over(
    job: Job, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SteppedClock(0.0)
    monkeypatch.setattr(root_cause, "time", clock)
    job.start(0, world_size=3)

    def answer() -> None:
        job.answer(0)
        clock.step_s = 1.0

    answering = meanwhile(answer)
    code = run(root_cause.stacks, job, "--wait", "2")
    answering.join()
    assert code == 1
    assert capsys.readouterr().err == "ranks 1, 2: never heard\n"


def test_a_run_that_ends_while_nobody_has_answered_is_an_error(job: Job, capsys: Any) -> None:
    job.start(0, world_size=1)

    def end() -> None:
        job.asked()
        job.send(0, state("oom", reason="out of memory"))

    ending = meanwhile(end)
    with pytest.raises(PerfagentError, match=r"no rank has answered: the run has ended \(oom\)"):
        run(root_cause.stacks, job)
    ending.join()
    assert capsys.readouterr().err.startswith("rank 0: ended (oom), last heard at ")


@pytest.mark.parametrize("how", ["ended", "lost"])
def test_a_profile_is_not_waited_for_when_its_training_is_gone(job: Job, how: str) -> None:
    job.start(0, world_size=1)

    def go() -> None:
        job.asked()
        if how == "ended":
            job.send(0, state("failed", reason="ValueError"))
        else:
            job.lose(0, heard=time.time() - 90)

    going = meanwhile(go)
    says = {
        "ended": r"the run has ended \(failed\): rank 0: ended",
        "lost": "the run is lost: rank 0: not heard since",
    }[how]
    with pytest.raises(PerfagentError, match=f"the profile was not taken, {says}"):
        run(root_cause.profile, job)
    going.join()


def profiles_in(job: Job) -> None:
    """Two that the run has, as agents send them: an older one's has no words."""
    shares = {"steps_s": 0.5, "loader_s": 0.4}
    says = ["Of 500 ms for 2 steps, the host spent 80 % in the data loader.", "Copies took 3 ms."]
    longest = [{"s": 0.2, "after": "aten::mm", "before": "aten::stack", "at_s": 0.0}]
    gaps = {"of": "operators", "busy_s": 0.1, "idle_s": 0.4, "idle_pct": 80.0, "longest": longest}
    first = {
        "profile": "ab12cd34ef56ab78",
        "command": "cm_1",
        "first_step": 3,
        "last_step": 4,
        "duration_s": 0.5,
        "parts": 0,
    }
    second = {**first, "profile": "ab99", "shares": shares, "says": says, "gaps": gaps, "operators": [
        {"name": "aten::mm", "calls": 4, "self_cpu_s": 0.05, "total_cpu_s": 0.06}
    ]}  # fmt: skip
    events = [Event(kind="profile", time=at, step=4, data=data) for at, data in ((2.0, first), (3.0, second))]
    job.send(0, *events)


def test_profiles_are_listed_with_what_they_show_and_one_is_shown_by_the_beginning_of_its_id(
    job: Job, capsys: Any
) -> None:
    job.start(0, world_size=1)
    assert run(root_cause.profile, job, "--list") == 0
    assert capsys.readouterr().out == "no profiles; without --list one is taken\n"
    profiles_in(job)
    assert run(root_cause.profile, job, "--list") == 0
    head, newest, older = capsys.readouterr().out.splitlines()
    assert head.split() == ["ID", "TAKEN", "RANK", "STEPS", "BECAUSE", "OF", "TRACE", "WHAT", "IT", "SHOWS"]
    assert newest.startswith("ab99 ")
    assert newest.endswith("80 % in the data loader.")
    assert older.startswith("ab12cd34ef56 ")
    assert run(root_cause.profile, job, "--show", "ab9") == 0
    shown = capsys.readouterr().out
    assert shown.startswith("rank 0, steps 3 to 4, 0.5 s, outside of operators 80 % of the time\n  Of 500 ms for 2 ")
    assert "Longest gaps between operators: 200 ms after aten::mm, before aten::stack." in shown
    assert "aten::mm      4       50.000        60.000" in shown
    assert run(root_cause.profile, job, "--list", "--json") == 0
    listed = json.loads(capsys.readouterr().out)["profiles"]
    assert [one["id"] for one in listed] == ["ab99", "ab12cd34ef56ab78"]
    for beginning, says in (("ab", "has 2 profiles"), ("x", "has no profile")):
        with pytest.raises(PerfagentError, match=f"{says} whose id begins with '{beginning}'"):
            run(root_cause.profile, job, "--show", beginning)


def test_a_profile_that_was_cut_short_says_so(job: Job, capsys: Any) -> None:
    job.start(0, world_size=1)

    def answer() -> None:
        identity = job.asked()["id"]
        job.send(0)
        summary = {
            "profile": "ab12",
            "command": identity,
            "first_step": 3,
            "last_step": 4,
            "duration_s": 0.5,
            "parts": 0,
        }
        said = "cut short before an evaluation: 2 of 5 steps are in it"
        done = {"command": identity, "kind": "profile", "state": "done", "message": said, "profile": "ab12"}
        job.send(0, Event(kind="profile", time=2.0, step=4, data=summary), Event(kind="command", time=2.0, data=done))

    answering = meanwhile(answer)
    code = run(root_cause.profile, job)
    answering.join()
    told = capsys.readouterr().out
    assert code == 0
    assert told.startswith("rank 0, steps 3 to 4, 0.5 s")
    assert "\ncut short before an evaluation: 2 of 5 steps are in it\n" in told
