"""`perfagent doctor` as it is called: with a server that asks for keys, without one, without torch."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from builders import ServerProcess, free_port, job_environment, server_process, until

import perfagent
from perfagent.calls import verdict

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with server_process(tmp_path_factory.mktemp("server"), "--auth", "required") as running:
        yield running


def doctor(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "perfagent", "doctor", *words]
    return subprocess.run(
        command, env=job_environment(folder, **environment), capture_output=True, text=True, timeout=120, check=False
    )


def checks(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, Any]]:
    return {check["name"]: check for check in json.loads(done.stdout)["checks"]}


def test_a_missing_or_wrong_key_is_a_problem_with_the_way_to_one(tmp_path: Path, guarded: ServerProcess) -> None:
    for key in ("", "pfa_ingest_12345678_" + "a" * 43):
        done = doctor(tmp_path, PERFAGENT_SERVER=guarded.url, PERFAGENT_API_KEY=key, PERFAGENT_PROT="1")
        assert done.returncode == 1
        lines = done.stdout.splitlines()
        (at,) = (place for place, line in enumerate(lines) if line.startswith("problem"))
        assert lines[at].split()[1] == "key"
        assert "`perfagent keys create ingest`" in lines[at + 1]
        assert any(line.startswith("warning  settings") and "PERFAGENT_PORT?" in line for line in lines)
        assert "Traceback" not in done.stderr


WITHOUT_TORCH = """
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "torch" else found(name, package)
"""


def test_without_torch_and_server_each_is_a_line(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_TORCH)
    done = doctor(tmp_path, "--json", "--server", f"http://127.0.0.1:{free_port()}", PYTHONPATH=str(tmp_path))
    found = checks(done)
    assert (done.returncode, done.stderr) == (1, "")
    assert found["torch"]["grade"] == "warning"
    assert found["torch"]["found"] == "not installed here"
    assert found["server"]["grade"] == "problem"
    assert "perfagent up" in found["server"]["next_step"]
    assert (found["key"]["grade"], found["clock"]["grade"]) == ("warning", "warning")


def test_a_run_says_why_it_has_no_verdict(
    tmp_path: Path, guarded: ServerProcess, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of the same server: it gives this process a key that sends and does not read."""
    key = guarded.admin("POST", "/keys", {"scope": "ingest", "name": "", "project": None})["key"]
    monkeypatch.setenv("PERFAGENT_API_KEY", key)
    with caplog.at_level(logging.WARNING, "perfagent"):
        with perfagent.init(server=guarded.url, run_id="asks") as run, monkeypatch.context() as patience:
            patience.setattr(verdict, "TIMEOUT_S", 30.0)  # the server answers, however late
            assert run.verdict() is None
            assert run.verdict() is None
        away = f"http://127.0.0.1:{free_port()}"
        with perfagent.init(server=away, run_id="away") as run:
            assert run.verdict() is None
    said = [message for message in caplog.messages if "no verdict here" in message]
    assert len(said) == 2, "once each"
    assert "PERFAGENT_API_KEY" in said[0] and "`perfagent keys create read`" in said[0]
    assert f"server {away} gave none within 2 s (ConnectError" in said[1]


def test_a_run_has_a_verdict_during_and_after_it(tmp_path: Path) -> None:
    with server_process(tmp_path / "server") as server, perfagent.init(server=server.url, run_id="judged") as run:
        run.log({"loss": 1.0})
        first = until(run.verdict, why="the server never knew the run")
        assert str(first).startswith("unknown: "), first
        for _ in range(300):
            run.log({"loss": 1.0})
        run.finish()
        until(lambda: str(run.verdict()).startswith("healthy: "), why="no verdict after the end")
