"""The server of this machine, named by its data folder; deleting asks; a shell completes what the server knows."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from builders import ServerProcess, server_process, until
from command_line import command, in_terminal

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with server_process(tmp_path_factory.mktemp("own")) as running:
        yield running


@pytest.fixture
def data(server: ServerProcess) -> str:
    return str(server.folder / "server-data")


def log(server: ServerProcess, run: str) -> None:
    row = {"run": run, "project": "p", "metrics": {"loss": 1.0}}
    httpx.post(f"{server.url}/api/v1/log", json=row, trust_env=False, timeout=30).raise_for_status()


def test_data_means_the_server_of_that_folder_for_every_command(
    server: ServerProcess, data: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERFAGENT_SERVER", "http://127.0.0.1:9")  # of training jobs; the folder is nearer
    log(server, "here")
    assert "here" in command(capsys, "runs", "--data", data).out
    assert "loss 1 in step 1" in command(capsys, "show", "here", "--data", data).out
    assert '"loss"' in command(capsys, "export", "here", "--data", data).out
    assert command(capsys, "wait", "here", "--until", "step=1", "--data", data).code == 0
    assert "logs over HTTP, without an agent" in command(capsys, "stacks", "here", "--wait", "1", "--data", data).err
    assert command(capsys, "profile", "here", "--wait", "1", "--data", data).code == 1
    assert "no channels" in command(capsys, "channels", "list", "--data", data).out
    assert command(capsys, "keys", "list", "--data", data).code == 0
    assert command(capsys, "delete", "here", "--yes", "--data", data).out.endswith("is deleted\n")
    assert command(capsys, "runs").code == 1, "without --data it is the one of the environment"


def test_without_an_address_the_own_folders_server_is_meant(
    server: ServerProcess,
    data: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log(server, "my own")
    monkeypatch.setenv("PERFAGENT_DATA", data)
    assert "my own" in command(capsys, "runs").out
    ended = command(capsys, "runs", "--data", str(tmp_path))
    assert ended.code == 1 and f"start it with `perfagent up --data {tmp_path}`" in ended.error
    refused = command(capsys, "delete", "my own")  # not on a terminal
    assert refused.code == 2 and "`perfagent delete 'my own' --yes`" in refused.error
    assert server.get("/runs", name="my own")["runs"]


@pytest.mark.parametrize(("answer", "code", "left"), [("\r", 1, 1), ("yes\r", 0, 0)])
def test_delete_asks_on_a_terminal(server: ServerProcess, data: str, answer: str, code: int, left: int) -> None:
    if not server.get("/runs", name="doomed")["runs"]:
        log(server, "doomed")
    ended = in_terminal(["delete", "doomed", "--data", data], os.environ, columns=200, asks="[y/N]", typed=answer)
    assert ended.code == code, ended.text
    assert "delete run doomed (" in ended.text and "1 step" in ended.text and "There is no way back." in ended.text
    assert ("nothing is deleted" in ended.text) is bool(left)
    assert len(server.get("/runs", name="doomed")["runs"]) == left


# --------------------------------------------------------------------------------------------------------------- comple


def completions(line: str, *, module: bool = False, **environment: str) -> list[str]:
    """By the protocol that argcomplete's shell function speaks: the answer comes through file descriptor 8."""
    ours, answer = os.pipe()
    start = [sys.executable, "-m", "perfagent"] if module else [str(Path(sys.executable).parent / "perfagent")]
    asked = {
        "_ARGCOMPLETE": "3" if module else "1", "_ARGCOMPLETE_IFS": "\n", "COMP_LINE": line, "COMP_POINT": str(len(line)),
        "COMP_TYPE": "9", "_ARGCOMPLETE_SHELL": "bash",
    }  # fmt: skip
    shell = ["bash", "-c", f'exec "$@" 8>&{answer} 9>/dev/null', "bash", *start]
    environment = {**os.environ, **asked, **environment}
    done = subprocess.run(shell, env=environment, pass_fds=[answer], capture_output=True, timeout=60)
    os.close(answer)
    with os.fdopen(ours) as file:
        words = file.read()
    assert done.stdout == b"", "nothing but the answer"
    return [word.strip() for word in words.split("\n") if word.strip()]


def test_a_shell_completes_commands_options_and_runs(server: ServerProcess, data: str) -> None:
    log(server, "my run")
    run = server.get("/runs", name="my run")["runs"][0]["run"]
    assert completions("perfagent sh") == ["show"]
    assert completions("perfagent runs --st") == ["--state"]
    assert "preempted" in completions("perfagent runs --state ")
    assert completions("python -m perfagent channels a", module=True) == ["add"]
    names = until(lambda: completions("perfagent show ", PERFAGENT_DATA=data))  # none where it takes over a second
    assert run in names and "my\\ run" in names and "--all" not in names
    assert until(lambda: completions(f"perfagent wait {run[:4]}", PERFAGENT_DATA=data)) == [run]
    assert completions("perfagent show ", PERFAGENT_SERVER="http://127.0.0.1:9") == [], "no server, no names, no noise"
    from perfagent import __main__, cli

    for module in (cli, __main__):
        assert module.__file__ is not None
        assert "PYTHON_ARGCOMPLETE_OK" in Path(module.__file__).read_text()[:1024]
