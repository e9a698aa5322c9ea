"""A job to which nobody named a server sends to this user's own on this machine, wherever that listens, and to no
stranger who has taken its port."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from builders import ServerProcess, free_port, until
from command_line import command
from commands import perfagent, perfagent_process
from ingest_server import IngestServer, Scripted
from ticks import tick_of

from perfagent.agent_config import AgentConfig
from perfagent.delivery import transport
from perfagent.delivery.sender import Sender
from perfagent.delivery.spool import Header, Spool, owner
from perfagent.endpoint import local_server
from perfagent.endpoint.local_server import LocalServer, announcement, data_folder
from perfagent.identity import Identity
from perfagent.wire import Group

pytestmark = pytest.mark.real
DEFAULT = f"http://127.0.0.1:{free_port()}"


@pytest.fixture
def local(monkeypatch: pytest.MonkeyPatch) -> LocalServer:
    """The data folder of this test's user; this process is the server that announces itself there.

    The default address is a port where nobody listens: whoever runs the tests may have a server on 8420."""
    for module in (local_server, transport):
        monkeypatch.setattr(module, "DEFAULT_SERVER", DEFAULT)
    data_folder().mkdir(parents=True)
    return LocalServer()


@pytest.fixture
def killed(local: LocalServer) -> str:
    """Where this user's server listened until kill -9 left its address file behind."""
    address = f"http://127.0.0.1:{free_port()}"
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as process:
        (local.data / "address").write_text(announcement(address, process.pid) + "\n")
    return address


@pytest.mark.parametrize("words", [("runs",), ("keys", "list"), ("sync",), ("doctor",)])
def test_command_says_where_the_server_was_that_was_killed(
    local: LocalServer, killed: str, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    if words == ("sync",):
        source = "a" * 32
        header = Header(source=source, project="p", rank=0, server=DEFAULT, run="r", attempt=1)
        left = Spool(AgentConfig.from_env().sources / source, header)
        left.append(*tick_of([Group(step=[1], time=[1.0], monotonic=[1.0], values={"loss": [1.0]})]), now=0.0)
        left.close(final="finished")
    ended = command(capsys, *words)
    assert ended.code == 1
    assert {killed, "perfagent up"} <= set(re.findall(r"http://[\d.:]+|perfagent up", ended.out + ended.err))
    named = command(capsys, "runs", "--server", f"http://127.0.0.1:{free_port()}")
    assert named.code == 1 and killed not in named.err


def test_the_server_that_runs_is_found_on_any_port(local: LocalServer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert AgentConfig.from_env().server == DEFAULT
    local.announce("http://127.0.0.1:8720")
    assert AgentConfig.from_env().server == "http://127.0.0.1:8720"
    assert AgentConfig.from_env(server="http://gpu:1").server == "http://gpu:1"
    monkeypatch.setenv("PERFAGENT_SERVER", "http://monitor:8420")
    assert AgentConfig.from_env().server == "http://monitor:8420"
    monkeypatch.delenv("PERFAGENT_SERVER")
    monkeypatch.setenv("PERFAGENT_DATA", str(local.data.parent / "other"))
    assert AgentConfig.from_env().server == DEFAULT, "another folder is another server's"


def test_server_that_is_gone_or_elsewhere_is_not_found(local: LocalServer) -> None:
    local.announce("http://127.0.0.1:8720")
    file = local.data / "address"
    assert file.stat().st_mode & 0o777 == 0o600
    address, process = file.read_text().splitlines()
    # another process, start of it, boot, namespace
    for at, instead in enumerate(("999999", "1", "6e5c2ab2-0000-4000-8000-000000000000", "1")):
        words = process.split()
        words[at] = instead
        file.write_text(f"{address}\n{' '.join(words)}\n")
        assert local.address is None
        assert AgentConfig.from_env().server == DEFAULT


def test_job_follows_its_server_and_no_stranger_gets_a_sample(local: LocalServer) -> None:
    """Of a job that began while no server ran."""
    sender = Sender(AgentConfig.from_env(), Identity(project="p", run="r", attempt=1))
    dead: list[bool] = []

    def log(step: int) -> None:
        sender.rows.append((step, time.time(), time.monotonic(), {"loss": 0.5}))

    with IngestServer(rule=lambda _: Scripted(cut=True) if dead else None) as first:
        assert sender.config.server == DEFAULT
        sender.start()
        local.announce(first.url)
        log(1)
        until(lambda: sender.config.server == first.url)
        (local.data / "address").unlink()
        dead.append(True)
        port = first.port
    with IngestServer(port=port) as stranger:
        log(2)
        until(lambda: sender.counters["failed"])
        with IngestServer() as second:
            local.announce(second.url)
            until(lambda: sender.config.server == second.url, within_s=60.0)
            assert second.values("loss")
            header = owner(sender.folder)
            assert header is not None and header.server == second.url, "what is left is for the second one"
            sender.close("finished", timeout_s=20.0)
        assert stranger.connections == 0


def test_job_sync_doctor_and_commands_mean_the_same_server(server: ServerProcess, tmp_path: Path) -> None:
    own = {"PERFAGENT_DATA": str(server.folder / "server-data")}
    script = "import perfagent\nrun = perfagent.init(name='job')\nrun.log({'loss': 1.0})\nprint(run.url)\n"
    (tmp_path / "job.py").write_text(script)
    trained = perfagent_process(tmp_path, "run", str(tmp_path / "job.py"), **own)
    assert f"{server.url}/run/" in trained.stdout, trained.stderr
    until(lambda: server.get("/runs", name="job")["runs"])
    assert "job" in perfagent(tmp_path, "runs", **own).stdout
    assert f"{server.url} answers" in perfagent(tmp_path, "doctor", **own).stdout
    assert (
        perfagent_process(tmp_path, "run", "--record", str(tmp_path / "r"), str(tmp_path / "job.py"), **own).returncode
        == 0
    )
    assert perfagent(tmp_path, "sync", str(tmp_path / "r"), **own).returncode == 0
    until(lambda: [run["state"] for run in server.get("/runs", name="job")["runs"]] == ["finished"] * 2)
