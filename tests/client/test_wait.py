"""perfagent wait: what came first, as an exit code."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest
from api_builders import Listening, frame, listening
from builders import free_port, until
from command_line import command

from perfagent.errors import ServerUnreachable
from perfagent.wire import Event
from perfagent_client import Client
from perfagent_client.polling import Patience

pytestmark = pytest.mark.real

NAN = float("nan")
Happens = Callable[[Callable[[], None]], None]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Listening]:
    with listening(tmp_path_factory.mktemp("wait")) as running:
        yield running


@pytest.fixture(autouse=True)
def its_address(server: Listening, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERFAGENT_SERVER", server.url)


def send(
    server: Listening, run: str, losses: list[float], *, first_step: int = 1, state: str = "", reason: str = ""
) -> None:
    last = first_step + len(losses) - 1
    events = [Event(kind="state", step=last, time=1.8e9, data={"state": state, "reason": reason})] if state else []
    server.take(frame({"loss": losses}, run=run, name=run, seq=first_step, first_step=first_step, events=events))


@pytest.fixture
def after_one_answer(monkeypatch: pytest.MonkeyPatch) -> Happens:
    """Lets something happen once the waiting command has got its first answer."""

    def do(act: Callable[[], None]) -> None:
        ask, acts = Patience.ask, iter([act])

        def asked(patience: Patience, question: Callable[[], object]) -> object:
            answer = ask(patience, question)
            for still_to_do in acts:
                still_to_do()
            return answer

        monkeypatch.setattr(Patience, "ask", asked)

    return do


def test_a_step_and_a_good_end_are_code_0(
    server: Listening, after_one_answer: Happens, capsys: pytest.CaptureFixture[str]
) -> None:
    send(server, "steps", [1.0] * 3)
    after_one_answer(lambda: send(server, "steps", [1.0] * 7, first_step=4))
    ended = command(capsys, "wait", "steps", "--until", "finding,step=10,end")
    assert ended.code == 0
    assert ended.out.splitlines()[0] == "steps (steps) is running, at step 3"
    assert ended.out.splitlines()[-1] == "steps has done step 10, and is at step 10"
    after_one_answer(lambda: send(server, "steps", [0.9], first_step=11, state="finished"))
    ended = command(capsys, "wait", "steps", "--until", "finding,end")
    assert (ended.code, ended.out.splitlines()[-1]) == (0, "steps ended (finished) at step 11")


def test_a_finding_that_comes_is_code_3(
    server: Listening, after_one_answer: Happens, capsys: pytest.CaptureFixture[str]
) -> None:
    send(server, "sick", [1.0] * 20)
    after_one_answer(lambda: send(server, "sick", [NAN] * 3, first_step=21))
    ended = command(capsys, "wait", "sick", "--until", "finding,step=1000,end", "--json")
    assert ended.code == 3
    said = json.loads(ended.out)
    assert (said["what"], said["exit_code"], said["state"]) == ("finding", 3, "running")
    assert said["finding"]["rule"] == "nonfinite_loss"


@pytest.mark.parametrize("until", [[], ["--until", "step=100"], ["--until", "finding,end"]])
def test_a_run_that_finished_with_a_nan_is_code_3(
    server: Listening, after_one_answer: Happens, capsys: pytest.CaptureFixture[str], until: list[str]
) -> None:
    """`perfagent wait RUN && deploy` deploys no such run, however soon after the end it asks."""
    run = "-".join(["spoilt", *until[1:]])
    send(server, run, [1.0] * 20)
    after_one_answer(lambda: send(server, run, [NAN] * 5, first_step=21, state="finished"))
    ended = command(capsys, "wait", run, *until)
    assert ended.code == 3
    assert "critical" in ended.out and "nonfinite_loss" in ended.out
    said = json.loads(command(capsys, "wait", run, *until, "--json").out)
    assert (said["exit_code"], said["state"], said["finding"]["rule"]) == (3, "finished", "nonfinite_loss")


def test_a_bad_end_is_code_4_also_though_a_rule_finds_it(server: Listening, capsys: pytest.CaptureFixture[str]) -> None:
    for state in ("failed", "oom", "killed", "preempted"):
        send(server, state, [1.0, 0.9], state=state, reason="ValueError: no more data")
        ended = command(capsys, "wait", state, "--until", "finding,step=100,end")
        last = f"{state} ended ({state}) at step 2, before step 100: ValueError: no more data"
        assert (ended.code, ended.out.splitlines()[-1]) == (4, last)


def test_what_a_run_died_of_is_a_finding_even_after_its_end(
    server: Listening, capsys: pytest.CaptureFixture[str]
) -> None:
    send(server, "died", [1.0] * 20 + [NAN] * 5, state="failed")
    with Client(server.url) as client:
        until(lambda: "nonfinite_loss" in [finding.rule for finding in client.findings("died")])
    assert command(capsys, "wait", "died", "--until", "finding,end").code == 3
    assert command(capsys, "wait", "died").code == 4, "nobody asked for findings"
    assert command(capsys, "wait", "died", "--until", "step=20").code == 0, "it got there"


def test_time_that_is_over_no_server_and_no_such_run_are_code_1(
    server: Listening, capsys: pytest.CaptureFixture[str]
) -> None:
    send(server, "slow", [1.0])
    over = command(capsys, "wait", "slow", "--until", "step=9", "--timeout", "0.7")
    assert (over.code, over.error) == (
        1, "perfagent wait: 0.7 s are over: slow is running, at step 1; wait longer with --timeout",
    )  # fmt: skip
    said = json.loads(command(capsys, "wait", "slow", "--timeout", "0.1", "--json").out)
    assert (said["what"], said["exit_code"], said["step"]) == ("timeout", 1, 1)
    assert command(capsys, "wait", "nobody").code == 1
    away = command(capsys, "wait", "slow", "--server", f"http://127.0.0.1:{free_port()}")
    assert away.code == 1 and "perfagent up" in away.error


def test_server_that_is_away_is_asked_again_but_not_for_ever(capsys: pytest.CaptureFixture[str]) -> None:
    answers = iter([1, ServerUnreachable("gone"), ServerUnreachable("gone"), 2])

    def question() -> int:
        answer = next(answers)
        if isinstance(answer, ServerUnreachable):
            raise answer
        return answer

    def away() -> int:
        raise ServerUnreachable("gone")

    patience = Patience(away_s=3600, retry_s=0)
    assert (patience.ask(question), patience.ask(question)) == (1, 2)
    assert capsys.readouterr().err == "perfagent: gone; asking again for 3600 s\n", "said once"
    hasty = Patience(away_s=0, retry_s=0)
    hasty.ask(lambda: 3)
    with pytest.raises(ServerUnreachable):
        hasty.ask(away)
    with pytest.raises(ServerUnreachable):
        Patience(away_s=60).ask(away)  # the first question is answered at once, or there is no server
