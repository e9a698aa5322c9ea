"""The demo's parts: its data, its ranks, what it shows. Its faults are in tests/e2e/test_demo_faults.py."""

from __future__ import annotations

import argparse
import os
import signal
import socket
from pathlib import Path

import pytest
from builders import until
from clocks import Clock

from perfagent.errors import ConfigError, PerfagentError
from perfagent_server.rules.catalogue import all_rules
from perfagent_tools.demo import command, data, faults, ranks, server


def test_targets_are_the_tokens_one_byte_later() -> None:
    windows = data.Windows(b"abcdefghij", context=4)
    assert len(windows) == 2
    tokens, targets = windows[1]
    assert bytes(tokens.tolist()) == b"efgh"
    assert bytes(targets.tolist()) == b"fghi"


def test_every_fault_expects_rules_that_there_are() -> None:
    known = {rule.id for rule in all_rules()} | {"healthy"}
    for name, fault in faults.FAULTS.items():
        assert faults.named(name).name == name
        assert set(fault.expects) <= known, name


def test_ranks_share_the_windows_in_as_many_batches() -> None:
    windows = data.Windows(bytes(range(256)) * 10, context=8)
    loaders = [data.loader(windows, 4, rank=rank, ranks=3) for rank in range(3)]
    shares = [[*loader.sampler] for loader in loaders]
    assert len({len(share) for share in shares}) == 1
    assert len({index for share in shares for index in share}) == sum(map(len, shares))


def test_a_hanging_job_is_stopped_once_its_stacks_have_come() -> None:
    clock = Clock(0.0)
    vigil = command._Vigil(faults.named("hang"), stays=False, clock=clock)
    assert vigil.look(trains=True, is_named=False) == ""
    clock.at = 70.0
    assert vigil.look(trains=True, is_named=True) == ""
    clock.at += command.STACKS_S
    assert vigil.look(trains=True, is_named=True) == "stop"
    stays = command._Vigil(faults.named("hang"), stays=True, clock=clock)
    assert stays.look(trains=True, is_named=True) == "stay"
    assert stays.look(trains=True, is_named=True) == "", "said once"
    assert stays.stays
    for fault, does in (("hang", "stop"), ("leak", "let go"), ("nan", "")):
        clock = Clock(0.0)
        vigil = command._Vigil(faults.named(fault), stays=True, clock=clock)
        clock.at = 1000.0
        assert vigil.look(trains=False, is_named=False) == "", "a slow start is no time of the rule"
        assert vigil.look(trains=True, is_named=False) == ""
        clock.at = 2000.0
        assert vigil.look(trains=True, is_named=False) == does, "a verdict is not waited for for ever"


def started(program: str, count: int) -> tuple[ranks.Ranks, list[str]]:
    lines: list[str] = []
    return ranks.Ranks(["-c", program], count, {**os.environ, "PYTHONUNBUFFERED": "1"}, lines.append), lines


@pytest.mark.real
def test_ranks_know_each_other_and_end_when_they_are_let_go() -> None:
    job, lines = started("import os, sys; print(os.environ['RANK'], os.environ['WORLD_SIZE']); sys.stdin.read()", 2)
    until(lambda: len(lines) == 2)
    assert not job.ended(within_s=0.0)
    job.let_go()
    assert job.ended(within_s=20.0)
    assert (sorted(lines), job.code) == (["0 2\n", "1 2\n"], 0)


@pytest.mark.real
def test_a_rank_that_fails_takes_the_others_with_it() -> None:
    job, _ = started("import os, sys; sys.exit(7) if os.environ['RANK'] == '1' else sys.stdin.read()", 2)
    assert job.ended(within_s=20.0)
    assert job.code in (7, -signal.SIGTERM)


@pytest.mark.real
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


def test_the_command_says_first_that_torch_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    parser = argparse.ArgumentParser()
    command.command(parser)
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    monkeypatch.setattr(command, "DemoServer", lambda **_: pytest.fail("a server"))
    with pytest.raises(ConfigError, match="pip install torch"):
        command.demo(parser.parse_args([]))


def test_the_server_of_the_environment_is_used_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERFAGENT_DATA", str(tmp_path))
    monkeypatch.setenv("PERFAGENT_SERVER", "http://127.0.0.1:8999/")
    monkeypatch.setattr(server, "_is_ours", lambda url: url == "http://127.0.0.1:8999")
    found = server.DemoServer(log=tmp_path / "log")
    found.http.close()
    assert (found.found, found.url) == (True, "http://127.0.0.1:8999")
    monkeypatch.setattr(server, "_is_ours", lambda url: False)
    with pytest.raises(PerfagentError, match="8999, which PERFAGENT_SERVER names"):
        server.DemoServer(log=tmp_path / "log")


@pytest.mark.real
def test_demo_asks_for_the_verdict_in_the_terminals_language(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LC_ALL", "LC_MESSAGES", "PERFAGENT_SERVER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LANG", "zh_CN.UTF-8")
    found = server.DemoServer(data=tmp_path, port=0, log=tmp_path / "log")
    assert found.http.headers["Accept-Language"] == "zh-CN"
    found.http.close()
