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
from commands import perfagent, perfagent_process


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with server_process(tmp_path_factory.mktemp("commands")) as running:
        yield running


@pytest.fixture
def server(started: ServerProcess) -> ServerProcess:
    """The server of all tests here; what is started again after one that stopped it has its data."""
    assert started.process is not None
    return started if started.process.poll() is None else started.start()


def one_line(text: str) -> bool:
    return len(text.strip().splitlines()) == 1 and "Traceback" not in text


def test_up_says_where_it_is_and_lets_the_administrator_in(server: ServerProcess) -> None:
    said = server.log
    assert f"http://127.0.0.1:{server.port}" in said
    assert "server-data" in said
    links = re.findall(r"http://\S+/login\?token=\S+", said)
    with httpx.Client(trust_env=False, base_url=server.url) as browser:
        answer = browser.get(links[-1])
        assert (answer.status_code, answer.headers["location"]) == (303, "/")
        assert browser.get("/api/v1/keys").status_code == 200
        page = browser.get("/")
        assert page.status_code == 200 and "perfagent" in page.text
        assert browser.get("/run/anything").headers["content-type"].startswith("text/html")
        assert browser.get("/api/nothing").json()["error"]["code"] == "not_found"
    data = server.folder / "server-data"
    assert stat.S_IMODE(data.stat().st_mode) == 0o700
    for file in data.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) & 0o077 == 0, file
    left = server.log
    for link in links:
        left = left.replace(link, "")
    assert "token=" not in left, "no token may get into a log"


def test_a_misspelt_setting_of_the_server_is_named(server: ServerProcess, tmp_path: Path) -> None:
    folder = str(server.folder / "server-data")
    ended = perfagent(tmp_path, "up", "--port", "0", "--data", folder, PERFAGENT_ALOWED_HOSTS="gpu.example.com")
    warning, _ = ended.stderr.splitlines()
    assert warning == "perfagent up: there is no setting PERFAGENT_ALOWED_HOSTS; did you mean PERFAGENT_ALLOWED_HOSTS?"


def test_a_taken_port_and_a_taken_folder_are_told_in_one_line(server: ServerProcess, tmp_path: Path) -> None:
    port = perfagent_process(tmp_path, "up", "--port", str(server.port), "--data", str(tmp_path / "other"))
    assert port.returncode == 1
    assert one_line(port.stderr), port.stderr
    assert f"port {server.port}" in port.stderr and "--port" in port.stderr
    folder = perfagent(tmp_path, "up", "--port", "0", "--data", str(server.folder / "server-data"))
    assert folder.returncode == 1
    assert one_line(folder.stderr), folder.stderr
    assert server.url in folder.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("--host", "0.0.0.0"), 1, "perfagent keys create"),
        (("--host", "no.such.host.example."), 2, "not an address"),
        (("--folder", "/does/not/exist"), 2, "not a folder"),
        (("--metrics", "nonsense"), 2, "must be the address of a ClickHouse server"),
        (("--data", "/proc/nothing"), 1, "--data"),
        (("--data", __file__), 1, "it is a file"),
        (("--database", "nonsense"), 2, "must be an address such as sqlite:////path/perfagent.db"),
        (("--database", "nonsense://host/name"), 2, "must be SQLite or PostgreSQL, as"),
        (("--port", "65536"), 2, "allowed are 0 (any free one) to 65535"),
        (("--database", "sqlite://"), 2, "sqlite:////"),
    ],
)
def test_up_refuses_what_cannot_work_with_the_cure(
    tmp_path: Path, arguments: tuple[str, ...], code: int, says: str
) -> None:
    ended = perfagent(tmp_path, "up", "--port", "0", *arguments)
    assert ended.returncode == code, ended.stderr
    assert one_line(ended.stderr), ended.stderr
    assert says in ended.stderr


@pytest.mark.sqlite
def test_a_public_server_starts_with_a_key_and_lets_only_keys_in(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    data = str(folder / "server-data")
    made = perfagent(tmp_path, "keys", "create", "read", "--data", data)
    assert made.returncode == 0, made.stderr
    key = made.stdout.strip()
    assert key.startswith("pfa_read_")
    with server_process(
        folder, "--host", "0.0.0.0", PERFAGENT_PUBLIC_URL="https://perfagent.example.invalid"
    ) as server:
        assert web().get(f"{server.url}/api/v1/runs").status_code == 401
        headers = {"Authorization": f"Bearer {key}"}
        assert web().get(f"{server.url}/api/v1/runs", headers=headers).status_code == 200
        evil = web().get(f"{server.url}/api/v1/runs", headers={**headers, "Host": "evil.example"})
        assert evil.status_code == 403
        # A command on the server's machine reaches it where it listens, and shows the public address.
        done = perfagent(tmp_path, "keys", "login", "--data", data)
        assert done.stdout.startswith("https://perfagent.example.invalid/login?token="), done.stderr


def test_a_key_without_a_limit_is_made_from_the_command_line(server: ServerProcess, tmp_path: Path) -> None:
    data = str(server.folder / "server-data")
    made = perfagent_process(
        tmp_path, "keys", "create", "ingest", "--limit", "requests_per_s=50", "--limit", "samples_per_s=inf", "--json",
        "--data", data,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    key = json.loads(made.stdout)
    assert key["limits"] == {"requests_per_s": 50, "samples_per_s": "Infinity"}
    assert "requests_per_s=50 samples_per_s=inf" in perfagent(tmp_path, "keys", "list", "--data", data).stdout
    changed = perfagent(tmp_path, "keys", "limit", key["id"], "bytes_per_s=1e6", "--data", data)
    assert changed.stdout.strip() == f"limits of {key['id']}: bytes_per_s=1000000", changed.stderr
    assert perfagent(tmp_path, "keys", "limit", key["id"], "--data", data).stdout.endswith("the server's\n")
    assert "must be NAME=NUMBER" in perfagent(tmp_path, "keys", "limit", key["id"], "bytes", "--data", data).stderr


def test_keys_are_managed_from_the_command_line(server: ServerProcess, tmp_path: Path) -> None:
    data = str(server.folder / "server-data")
    made = perfagent_process(
        tmp_path, "keys", "create", "ingest", "--name", "cluster", "--expires-days", "1", "--json", "--data", data
    )
    key = json.loads(made.stdout)
    assert key["expires"] is not None
    listed = perfagent(tmp_path, "keys", "list", "--data", data)
    assert key["id"] in listed.stdout and "cluster" in listed.stdout and key["key"] not in listed.stdout
    revoked = perfagent(tmp_path, "keys", "revoke", key["id"], "--data", data)
    assert revoked.returncode == 0, revoked.stderr
    keys = json.loads(perfagent(tmp_path, "keys", "list", "--json", "--data", data).stdout)["keys"]
    assert [one["revoked"] is not None for one in keys if one["id"] == key["id"]] == [True]
    unknown = perfagent(tmp_path, "keys", "revoke", "nothing", "--data", data)
    assert unknown.returncode == 1
    assert one_line(unknown.stderr), unknown.stderr
    assert "there is no key 'nothing'; `perfagent keys list` lists them" in unknown.stderr
    assert perfagent(tmp_path, "keys", "login", "--data", data).stdout.startswith(f"{server.url}/login?token=")
    nobody = perfagent(tmp_path, "keys", "list", "--server", server.url, "--data", str(tmp_path / "elsewhere"))
    assert nobody.returncode == 1 and one_line(nobody.stderr)
    assert perfagent(tmp_path, "keys", "list", "--server", f"http://127.0.0.1:{free_port()}").returncode == 1
    assert perfagent(tmp_path, "keys", "create", "root").returncode == 2


def log_row(server: ServerProcess, run: str, value: float) -> None:
    body = {"run": run, "metrics": {"loss": value}}
    web().post(f"{server.url}/api/v1/log", json=body, timeout=30).raise_for_status()


@pytest.mark.sqlite
def test_a_backup_taken_while_writing_is_restored(server: ServerProcess, tmp_path: Path) -> None:
    copy = tmp_path / "copy.db"
    data = str(server.folder / "server-data")
    for number in range(20):
        log_row(server, "before", float(number))
    saved = perfagent(tmp_path, "db", "backup", str(copy), "--data", data)
    assert saved.returncode == 0, saved.stderr
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600
    again = perfagent(tmp_path, "db", "backup", str(copy), "--data", data)
    assert again.returncode == 1 and one_line(again.stderr)
    log_row(server, "after", 1.0)
    running = perfagent(tmp_path, "db", "restore", str(copy), "--data", data)
    assert running.returncode == 1 and "stop it" in running.stderr
    server.stop()
    nonsense = tmp_path / "nonsense"
    nonsense.write_bytes(b"no database" * 1000)
    assert perfagent(tmp_path, "db", "restore", str(nonsense), "--data", data).returncode == 1
    refused = perfagent(tmp_path, "db", "restore", str(copy), "--data", data)
    assert refused.returncode == 1 and one_line(refused.stderr) and "--replace" in refused.stderr
    restored = perfagent(tmp_path, "db", "restore", str(copy), "--replace", "--data", data)
    assert restored.returncode == 0, restored.stderr
    server.start()
    runs = [(run["name"], run["step"]) for run in server.get("/runs")["runs"]]
    assert ("before", 20) in runs
    assert "after" not in [name for name, _ in runs]
    [kept] = [path for path in Path(data).iterdir() if ".before-" in path.name]
    with sqlite3.connect(kept) as connection:
        assert connection.execute("SELECT count(*) FROM run WHERE name IN ('before', 'after')").fetchone() == (2,)
    connection.close()


def test_upgrade_makes_the_tables(tmp_path: Path) -> None:
    done = perfagent(tmp_path, "db", "upgrade", "--data", str(tmp_path / "d"))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "d" / "perfagent.db").exists()


@pytest.mark.sqlite
def test_upgrade_check_says_what_would_be_done_and_does_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    empty = perfagent(tmp_path, "db", "upgrade", "--check", "--data", str(folder))
    assert (empty.returncode, folder.exists()) == (1, False)
    assert "0001" in empty.stdout
    assert perfagent(tmp_path, "db", "upgrade", "--data", str(folder)).returncode == 0
    done = perfagent(tmp_path, "db", "upgrade", "--check", "--data", str(folder))
    assert (done.returncode, "nothing to do" in done.stdout) == (0, True)
    with contextlib.closing(sqlite3.connect(folder / "perfagent.db")) as connection, connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    newer = perfagent(tmp_path, "db", "upgrade", "--check", "--data", str(folder))
    assert newer.returncode == 1 and one_line(newer.stderr) and "upgrade perfagent" in newer.stderr


@pytest.mark.fault
def test_s08_a_stop_during_ingest_is_quick_and_keeps_what_was_acknowledged(server: ServerProcess) -> None:
    acknowledged = 0
    assert server.process is not None
    with httpx.Client(trust_env=False, timeout=30) as client:
        idle = socket.create_connection(("127.0.0.1", server.port))
        began = float("inf")
        while True:
            try:
                client.post(
                    f"{server.url}/api/v1/log", json={"run": "stopped", "metrics": {"x": 1.0}}
                ).raise_for_status()
            except httpx.HTTPError:
                break
            acknowledged += 1
            if acknowledged == 50:
                os.kill(server.process.pid, signal.SIGTERM)
                began = time.monotonic()
        assert server.process.wait(timeout=20) == 0, server.log[-2000:]
        assert time.monotonic() - began < 10
        idle.close()
    assert acknowledged >= 50
    server.start()
    (run,) = [run for run in server.get("/runs")["runs"] if run["name"] == "stopped"]
    found: Any = until(lambda: server.get(f"/runs/{run['run']}/series", name="x", points=20_000))
    assert sum(found["count"]) >= acknowledged
    assert sum(found["count"]) <= acknowledged + 1, "the one in flight may be stored, nothing else"


@pytest.mark.fault
def test_s08_a_stop_is_quick_also_with_sockets_that_never_answer(server: ServerProcess) -> None:
    """A page that went to sleep, a body that stopped half way, an export nobody reads: none of them may hold up the
    end."""
    assert server.process is not None
    rows = [{"run": "exported", "metrics": {f"x{name}": 1 / 3 for name in range(20)}} for _ in range(5000)]
    web().post(f"{server.url}/api/v1/log", json=rows, timeout=60).raise_for_status()
    (run,) = [run for run in server.get("/runs")["runs"] if run["name"] == "exported"]
    host = f"HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n"
    upgrade = "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    upgrade += "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
    half = "Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n{"
    requests = [f"GET /ws/live {host}{upgrade}\r\n"] * 3
    requests += [f"GET /api/v1/runs/{run['run']}/export {host}\r\n", f"POST /api/v1/log {host}{half}"]
    sockets = [socket.create_connection(("127.0.0.1", server.port)) for _ in requests]
    try:
        for connection, request in zip(sockets, requests, strict=True):
            connection.sendall(request.encode())
        for connection in sockets[:4]:
            assert connection.recv(12).startswith(b"HTTP/1.1 ")
        began = time.monotonic()
        os.kill(server.process.pid, signal.SIGTERM)
        assert server.process.wait(timeout=20) == 0, server.log[-2000:]
        assert time.monotonic() - began < 10
    finally:
        for connection in sockets:
            connection.close()
    assert "Traceback" not in server.log
    assert not (server.folder / "server-data" / "address").exists()
