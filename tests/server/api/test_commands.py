"""perfagent up, db and keys, with real servers."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import sqlite3
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from builders import ServerProcess, free_port, server_process, until, web
from commands import Ended, perfagent, perfagent_process

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with server_process(tmp_path_factory.mktemp("commands")) as running:
        yield running


@pytest.fixture
def server(started: ServerProcess) -> ServerProcess:
    """The server of all tests here; what is started again after one that stopped it has its data."""
    assert started.process is not None
    return started if started.process.poll() is None else started.start()


def data_of(server: ServerProcess) -> Path:
    return server.folder / "server-data"


def refused(ended: Any, *words: str, code: int = 1) -> None:
    """In one line, with these words."""
    assert ended.returncode == code, ended.stderr
    [line] = ended.stderr.strip().splitlines()
    for word in words:
        assert word in line


def test_up_says_where_it_is_and_lets_the_administrator_in(server: ServerProcess) -> None:
    said, data = server.log, data_of(server)
    assert f"http://127.0.0.1:{server.port}" in said and "server-data" in said
    links = re.findall(r"http://\S+/login\?token=\S+", said)
    with httpx.Client(trust_env=False, base_url=server.url) as browser:
        answer = browser.get(links[-1])
        assert (answer.status_code, answer.headers["location"]) == (303, "/")
        assert browser.get("/api/v1/keys").status_code == 200
        page = browser.get("/")
        assert page.status_code == 200 and "perfagent" in page.text
        assert browser.get("/run/anything").headers["content-type"].startswith("text/html")
        assert browser.get("/api/nothing").json()["error"]["code"] == "not_found"
    assert stat.S_IMODE(data.stat().st_mode) == 0o700
    assert [file for file in data.iterdir() if stat.S_IMODE(file.stat().st_mode) & 0o077] == []
    for link in links:
        said = said.replace(link, "")
    assert "token=" not in said, "no token may get into a log"


def test_what_is_taken_or_misspelt_is_told_in_one_line(server: ServerProcess, tmp_path: Path) -> None:
    port = perfagent_process(tmp_path, "up", "--port", str(server.port), "--data", str(tmp_path / "other"))
    refused(port, f"port {server.port}", "--port")
    folder = ("up", "--port", "0", "--data", str(data_of(server)))
    refused(perfagent(tmp_path, *folder), server.url)
    warning, _ = perfagent(tmp_path, *folder, PERFAGENT_ALOWED_HOSTS="gpu.example.com").stderr.splitlines()
    assert "PERFAGENT_ALOWED_HOSTS; did you mean PERFAGENT_ALLOWED_HOSTS?" in warning


def test_up_refuses_what_cannot_work_with_the_cure(tmp_path: Path) -> None:
    for words, code, says in (
        ("--host 0.0.0.0", 1, "perfagent keys create"),
        ("--host no.such.host.example.", 2, "not an address"),
        ("--folder /does/not/exist", 2, "not a folder"),
        ("--metrics nonsense", 2, "ClickHouse"),
        ("--data /proc/nothing", 1, "--data"),
        (f"--data {__file__}", 1, "it is a file"),
        ("--database nonsense", 2, "sqlite:////path/perfagent.db"),
        ("--database nonsense://host/name", 2, "SQLite or PostgreSQL"),
        ("--database sqlite://", 2, "sqlite:////"),
        ("--port 65536", 2, "0 (any free one) to 65535"),
    ):
        refused(perfagent(tmp_path, "up", "--port", "0", *words.split()), says, code=code)


def test_keys_are_managed_from_the_command_line(server: ServerProcess, tmp_path: Path) -> None:
    data = str(data_of(server))

    def keys(*words: str, to: str = data) -> Ended:
        return perfagent(tmp_path, "keys", *words, "--data", to)

    limits = ("--limit", "requests_per_s=50", "--limit", "samples_per_s=inf")
    made = keys("create", "ingest", "--name", "cluster", "--expires-days", "1", *limits, "--json")
    key = json.loads(made.stdout)
    assert key["expires"] is not None
    assert key["limits"] == {"requests_per_s": 50, "samples_per_s": "Infinity"}
    listed = keys("list").stdout
    for part in (key["id"], "cluster", "requests_per_s=50 samples_per_s=inf"):
        assert part in listed
    assert key["key"] not in listed
    changed = keys("limit", key["id"], "bytes_per_s=1e6")
    assert changed.stdout.strip() == f"limits of {key['id']}: bytes_per_s=1000000", changed.stderr
    assert "NAME=NUMBER" in keys("limit", key["id"], "bytes").stderr
    assert keys("revoke", key["id"]).returncode == 0
    every = json.loads(keys("list", "--json").stdout)["keys"]
    assert [one["revoked"] is not None for one in every if one["id"] == key["id"]] == [True]
    refused(keys("revoke", "nothing"), "'nothing'", "perfagent keys list")
    assert keys("login").stdout.startswith(f"{server.url}/login?token=")
    refused(keys("list", "--server", server.url, to=str(tmp_path / "elsewhere")))
    refused(keys("list", "--server", f"http://127.0.0.1:{free_port()}"))
    assert keys("create", "root").returncode == 2


@pytest.mark.fault
def test_s08_a_stop_is_quick_and_keeps_what_was_acknowledged(server: ServerProcess) -> None:
    """A page that went to sleep, a body that stopped half way, an export nobody reads: none of them may hold up the
    end."""
    assert server.process is not None
    log_rows(server, *({"run": "exported", "metrics": {f"x{at}": 1 / 3 for at in range(20)}} for _ in range(5000)))
    host = f"HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n"
    upgrade = "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    upgrade += "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
    requests = [f"GET /ws/live {host}{upgrade}\r\n"]
    requests.append(f"GET /api/v1/runs/{run_named(server, 'exported')['run']}/export {host}\r\n")
    requests.append(f"POST /api/v1/log {host}Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n{{")
    acknowledged = 0
    with contextlib.ExitStack() as opened:
        sockets = [opened.enter_context(socket.create_connection(("127.0.0.1", server.port))) for _ in requests]
        for connection, request in zip(sockets, requests, strict=True):
            connection.sendall(request.encode())
        for connection in sockets[:2]:
            assert connection.recv(12).startswith(b"HTTP/1.1 ")
        client = opened.enter_context(httpx.Client(trust_env=False, timeout=30))
        with contextlib.suppress(httpx.HTTPError):
            while True:
                row = {"run": "stopped", "metrics": {"x": 1.0}}
                client.post(f"{server.url}/api/v1/log", json=row).raise_for_status()
                acknowledged += 1
                if acknowledged == 50:
                    os.kill(server.process.pid, signal.SIGTERM)
                    began = time.monotonic()
        assert server.process.wait(timeout=20) == 0, server.log[-2000:]
        assert time.monotonic() - began < 10
    assert "Traceback" not in server.log
    assert not (data_of(server) / "address").exists()
    server.start()
    run = run_named(server, "stopped")["run"]
    found: Any = until(lambda: server.get(f"/runs/{run}/series", name="x", points=20_000))
    assert acknowledged <= sum(found["count"]) <= acknowledged + 1, "the one in flight may be stored, nothing else"


def log_rows(server: ServerProcess, *rows: dict[str, Any]) -> None:
    web().post(f"{server.url}/api/v1/log", json=rows, timeout=60).raise_for_status()


def run_named(server: ServerProcess, name: str) -> dict[str, Any]:
    (found,) = [run for run in server.get("/runs")["runs"] if run["name"] == name]
    return dict(found)


@pytest.mark.sqlite
def test_a_backup_taken_while_writing_is_restored(server: ServerProcess, tmp_path: Path) -> None:
    copy, data = tmp_path / "copy.db", data_of(server)

    def db(*words: str) -> Ended:
        return perfagent(tmp_path, "db", *words, "--data", str(data))

    log_rows(server, *({"run": "before", "metrics": {"loss": float(number)}} for number in range(20)))
    saved = db("backup", str(copy))
    assert saved.returncode == 0, saved.stderr
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600
    refused(db("backup", str(copy)))
    log_rows(server, {"run": "after", "metrics": {"loss": 1.0}})
    refused(db("restore", str(copy)), "stop it")
    server.stop()
    nonsense = tmp_path / "nonsense"
    nonsense.write_bytes(b"no database" * 1000)
    refused(db("restore", str(nonsense)))
    refused(db("restore", str(copy)), "--replace")
    restored = db("restore", str(copy), "--replace")
    assert restored.returncode == 0, restored.stderr
    server.start()
    assert run_named(server, "before")["step"] == 20
    assert "after" not in [run["name"] for run in server.get("/runs")["runs"]]
    [kept] = [path for path in data.iterdir() if ".before-" in path.name]
    with contextlib.closing(sqlite3.connect(kept)) as connection:
        assert connection.execute("SELECT count(*) FROM run WHERE name IN ('before', 'after')").fetchone() == (2,)
