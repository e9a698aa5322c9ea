"""Commands as an agent gets them: obeyed once, answered always, and only its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from builders import free_port, until
from ingest_server import IngestServer

from perfagent.agent_config import AgentConfig
from perfagent.delivery.handoff import Sender
from perfagent.governor import Governor
from perfagent.identity import Identity
from perfagent.rootcause import investigator


def answers(job: Any) -> list[tuple[str, str, str]]:
    return [(data["command"], data["kind"], data["state"]) for data in job.events("command")]


def test_a_command_that_comes_again_is_obeyed_once(train):
    job = train()
    for _ in range(3):
        job.command("stacks", "s1")
    assert len(job.events("stacks")) == 1
    assert answers(job) == [("s1", "stacks", "done")]


def test_what_it_does_not_know_it_says(train):
    job = train()
    job.command("reboot", "x1")
    job.command("flush", "f1")
    assert answers(job) == [("x1", "reboot", "refused"), ("f1", "flush", "done")]
    assert job.events("command")[0]["message"] == "this agent knows flush, profile, sampling, stacks, not 'reboot'"


def test_sampling_is_changed_within_limits(train):
    job = train()
    periods: list[float] = []
    job.run._investigator.set_sample_period = periods.append
    job.command("sampling", "a", sample_s=4, overhead_budget_pct=0.1)
    assert periods == [4.0]
    job.command("sampling", "b", sample_s=0.01)
    job.command("sampling", "c", overhead_budget_pct=float("nan"))
    assert periods == [4.0]
    assert [state for _, _, state in answers(job)] == ["done", "refused", "refused"]


def test_a_smaller_budget_makes_gradients_be_measured_less_often():
    clock = [0.0]
    governor = Governor(1.0, clock=lambda: clock[0])
    before = governor.period(1_000_000, 100_000_000)
    governor.set_budget(0.1)
    clock[0] = 2.0
    governor.report(0, 0, 0.0)
    assert (before, governor.period(1_000_000, 100_000_000)) == (1, 10)


@pytest.mark.parametrize("odd", [{}, {"kind": 7}, {"kind": "profile", "params": "x"}, {"id": ["a"], "kind": "stacks"}])
def test_an_odd_command_does_no_harm(train, odd):
    job = train()
    for callback in job.sender.on_command:
        callback(odd)
    job.steps(2)
    assert len(job.losses) == 2


def test_while_no_step_ends_their_age_is_told_and_else_it_is_not(train, monkeypatch):
    job = train()
    job.steps(3)
    p = job.run._progress
    age_s = [0.0]
    monkeypatch.setattr(investigator, "now", lambda: p.step_end + round(1e9 * age_s[0]))
    for age_s[0] in (30.0, 30.0, 30.9, 31.0):
        job.run._investigator.poll()
    ages = [(row[0], row[4][0]) for row in job.sender.rows if row[3] == ("step_age_s",)]
    assert ages == [(3, 30.0), (3, 31.0)], "once a second, however often it is looked at"
    age_s[0] = 0.0
    job.sender.rows.clear()
    job.steps(2)
    assert not [values for _, values in job.recorded.rows if "step_age_s" in values]


def sender_for(server: IngestServer, folder: Path) -> Sender:
    config = AgentConfig(server=server.url, state_dir=folder, flush_s=0.05, spool_tick_s=0.02)
    return Sender(config, Identity(project="p", run="r", attempt=1))


def test_commands_in_the_answer_to_a_dead_process_spool_are_not_ours(tmp_path: Path) -> None:
    """Its samples are sent by whoever finds them; what the server asks it for is not for us."""
    with IngestServer(port=free_port()) as nobody:
        nobody.close()
        dead = sender_for(nobody, tmp_path)
        dead.start()
        dead.rows.append((1, 1.0, 1.0, ("loss",), (2.0,)))
        dead.close("killed", timeout_s=20.0)
        assert dead.closed.wait(20), "it still holds its spool"
    heard: list[dict[str, Any]] = []
    with IngestServer(port=nobody.port) as server:

        def of_the_dead(frame: Any) -> None:
            if frame.source == dead.identity.source:
                server.commands.append({"id": "for-the-dead", "kind": "stacks"})
            elif not server.commands and not heard:
                server.commands.append({"id": "for-us", "kind": "flush"})

        server.rule = of_the_dead
        ours = sender_for(server, tmp_path)
        ours.on_command.append(lambda command: heard.append(dict(command)))
        ours.start()
        ours.rows.append((1, 1.0, 1.0, ("loss",), (2.0,)))
        until(
            lambda: any(source == dead.identity.source for source, _ in server.stored),
            why="the dead one's frame never came",
        )
        ours.rows.append((2, 1.0, 1.0, ("loss",), (2.0,)))
        until(lambda: len(server.stored) >= 3)
        ours.close("finished")
    assert [command["id"] for command in heard] == ["for-us"]
