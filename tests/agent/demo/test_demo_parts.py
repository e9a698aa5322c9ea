"""The demo's parts: its data, its faults, what it shows. The whole of it is in tests/e2e/test_demo.py."""

from __future__ import annotations

import argparse
import io
import math
import os
import signal
import socket
from pathlib import Path

import pytest
import torch
from builders import until

from perfagent.demo import command, data, faults, ranks, server
from perfagent.demo.faults import life
from perfagent.demo.model import GPT
from perfagent.errors import ConfigError, PerfagentError
from perfagent_server.rules.catalogue import all_rules


def test_targets_are_the_tokens_one_byte_later() -> None:
    windows = data.Windows(b"abcdefghij", context=4)
    assert len(windows) == 2
    tokens, targets = windows[1]
    assert bytes(tokens.tolist()) == b"efgh"
    assert bytes(targets.tolist()) == b"fghi"


def test_the_same_seed_gives_the_same_batches() -> None:
    windows = data.Windows(bytes(range(256)) * 10, context=8)
    first, second = (next(iter(data.loader(windows, 4, seed=3)))[0] for _ in range(2))
    assert torch.equal(first, second)


def test_a_python_without_sources_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "short.py").write_text("pass")
    with pytest.raises(PerfagentError, match="holds only 4 bytes"):
        data.read_sources(tmp_path)


def test_the_first_loss_is_that_of_a_guess() -> None:
    torch.manual_seed(0)
    logits = GPT()(torch.randint(0, 256, (2, 64)))
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.randint(0, 256, (128,)))
    assert abs(loss.item() - math.log(256)) < 0.2


def job(steps: int = 20) -> faults.Job:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    return faults.Job(model, torch.optim.SGD(model.parameters(), lr=0.1), 0, steps, {})


def test_every_name_of_a_fault_is_there_or_refused_with_those_that_are() -> None:
    for name in faults.FAULTS:
        assert faults.named(name).name == name
    with pytest.raises(ConfigError, match="there is no fault 'nonsense'; there are: none, nan, spike, divergence,"):
        faults.named("nonsense")


def test_every_fault_expects_rules_that_there_are() -> None:
    known = {rule.id for rule in all_rules()} | {"healthy"}
    for fault in faults.FAULTS.values():
        assert set(fault.expects) <= known, fault.name


def test_a_masked_batch_is_nan_once_and_all_others_are_the_mean() -> None:
    losses, nan = torch.tensor([1.0, 3.0]), faults.named("nan")
    found = [nan.loss(job(), step, losses).item() for step in range(1, 21)]
    assert [step for step, loss in enumerate(found, start=1) if math.isnan(loss)] == [10]
    assert {loss for loss in found if not math.isnan(loss)} == {2.0}


def test_a_spike_spoils_the_targets_of_the_last_steps_and_no_tokens() -> None:
    spike = faults.named("spike")
    tokens, targets = torch.zeros(8, 64, dtype=torch.long), torch.zeros(8, 64, dtype=torch.long)
    spoiled = []
    for step in range(1, 301):
        seen, wanted = spike.batch(job(300), step, tokens, targets)
        assert torch.equal(seen, tokens)
        if not torch.equal(wanted, targets):
            spoiled.append(step)
    assert spoiled == list(range(286, 301))


def test_a_gradient_explodes_from_half_way_on() -> None:
    explosion, here = faults.named("grad-explosion"), job()
    explosion.prepare(here)
    norms = []
    for step in range(1, 21):
        explosion.begin(here, step)
        here.model.zero_grad()
        here.model(torch.ones(1, 4)).sum().backward()
        norms.append(next(here.model.parameters()).grad.norm().item())  # type: ignore[union-attr]
    assert len({*norms[:10]}) == 1
    assert norms[-1] > 10 * norms[0]


def test_a_leak_keeps_something_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    now, here = [100.0], job()
    monkeypatch.setattr(life.time, "monotonic", lambda: now[0])
    for step in range(1, 101):
        faults.named("leak").end(here, step, torch.zeros(4))
        now[0] += life.LEAK_EVERY_S / 10
    assert len(here.kept["copies"]) == 10


def test_ranks_share_the_windows_and_see_the_same_number_of_batches() -> None:
    windows = data.Windows(bytes(range(256)) * 10, context=8)
    loaders = [data.loader(windows, 4, rank=rank, ranks=3) for rank in range(3)]
    shares = [[*loader.sampler] for loader in loaders]
    assert len({len(share) for share in shares}) == 1
    assert len({index for share in shares for index in share}) == sum(map(len, shares))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_hanging_job_is_stopped_when_its_stacks_have_come_or_left_alone_to_be_looked_at() -> None:
    clock = Clock()
    vigil = command._Vigil(faults.named("hang"), stays=False, clock=clock)
    assert vigil.look(trains=True, is_named=False) == ""
    clock.now = 70.0
    assert vigil.look(trains=True, is_named=True) == ""
    clock.now += command.STACKS_S
    assert vigil.look(trains=True, is_named=True) == "stop"
    stays = command._Vigil(faults.named("hang"), stays=True, clock=clock)
    assert stays.look(trains=True, is_named=True) == "stay"
    assert stays.look(trains=True, is_named=True) == "", "said once"
    assert stays.stays


@pytest.mark.parametrize(("fault", "does"), [("hang", "stop"), ("leak", "let go"), ("nan", "")])
def test_a_verdict_that_does_not_come_is_not_waited_for_for_ever(fault: str, does: str) -> None:
    clock = Clock()
    vigil = command._Vigil(faults.named(fault), stays=True, clock=clock)
    clock.now = 1000.0
    assert vigil.look(trains=False, is_named=False) == "", "a slow start is no time of the rule"
    assert vigil.look(trains=True, is_named=False) == ""
    clock.now = 2000.0
    assert vigil.look(trains=True, is_named=False) == does


def started(program: str, count: int) -> tuple[ranks.Ranks, list[str]]:
    lines: list[str] = []
    return ranks.Ranks(["-c", program], count, {**os.environ, "PYTHONUNBUFFERED": "1"}, lines.append), lines


def test_ranks_know_each_other_and_end_when_they_are_let_go() -> None:
    job, lines = started("import os, sys; print(os.environ['RANK'], os.environ['WORLD_SIZE']); sys.stdin.read()", 2)
    until(lambda: len(lines) == 2)
    assert not job.ended(within_s=0.0)
    job.let_go()
    assert job.ended(within_s=20.0)
    assert (sorted(lines), job.code) == (["0 2\n", "1 2\n"], 0)


def test_a_rank_that_fails_takes_the_others_with_it() -> None:
    job, _ = started("import os, sys; sys.exit(7) if os.environ['RANK'] == '1' else sys.stdin.read()", 2)
    assert job.ended(within_s=20.0)
    assert job.code in (7, -signal.SIGTERM)


def test_a_rank_that_heeds_no_signal_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "STOP_S", 0.2)
    job, lines = started(
        "import signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1); sys.stdin.read()", 1
    )
    until(lambda: lines)
    job.stop(signal.SIGTERM)
    assert job.ended(within_s=0.0)
    assert job.code == -signal.SIGKILL


def test_a_screen_that_is_no_terminal_gets_a_line_for_each_tenth() -> None:
    out = io.StringIO()
    screen = command._Screen(20, out)
    for step in range(21):
        screen.step, screen.loss = step, "2.5"
        screen.draw()
    lines = out.getvalue().splitlines()
    assert len(lines) == 11
    assert lines[0] == "step 1/20  loss 2.5", "nothing is known before the first step"
    assert lines[-1] == "step 20/20  loss 2.5"


def test_a_verdict_is_printed_when_its_rule_changes_and_its_sentence_alone_names_a_step() -> None:
    out = io.StringIO()
    screen = command._Screen(20, out)
    healthy = {"rule": "healthy", "severity": "info", "message": "Nothing."}
    for finding in (
        healthy,
        healthy,
        {"rule": "nonfinite_loss", "severity": "critical", "message": "The loss became NaN."},
    ):
        screen.verdict(finding)
    assert out.getvalue().splitlines() == [
        "verdict: healthy: Nothing.",
        "verdict: nonfinite_loss (critical): The loss became NaN.",
    ]


def test_a_port_taken_by_another_program_is_left_alone(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = other.getsockname()[1]
        found = server.DemoServer(data=tmp_path, port=taken, log=tmp_path / "log")
        assert not found.found
        assert found.moved_from == taken
        assert not found.url.endswith(f":{taken}")
        found.http.close()


def test_a_log_that_cannot_be_written_is_told_in_words_and_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("no folder")
    log = tmp_path / "state" / "demo-server.log"
    with pytest.raises(ConfigError, match=r"(?s)demo-server\.log, cannot be written \(.+\); set XDG_STATE_HOME"):
        server.DemoServer(data=tmp_path, port=0, log=log).__enter__()


def test_the_command_says_that_torch_is_missing_before_it_starts_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    parser = argparse.ArgumentParser()
    command.command(parser)
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    monkeypatch.setattr(command, "DemoServer", lambda **_: pytest.fail("a server"))
    with pytest.raises(ConfigError, match="pip install torch"):
        command.demo(parser.parse_args([]))


def test_the_server_of_the_environment_is_used_and_never_silently_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERFAGENT_DATA", str(tmp_path))
    monkeypatch.setenv("PERFAGENT_SERVER", "http://127.0.0.1:8999/")
    monkeypatch.setattr(server, "_is_ours", lambda url: url == "http://127.0.0.1:8999")
    found = server.DemoServer(log=tmp_path / "log")
    found.http.close()
    assert (found.found, found.url) == (True, "http://127.0.0.1:8999")
    monkeypatch.setattr(server, "_is_ours", lambda url: False)
    with pytest.raises(PerfagentError, match="8999, which PERFAGENT_SERVER names"):
        server.DemoServer(log=tmp_path / "log")
