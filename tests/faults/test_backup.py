"""Row S11: a backup is taken while the server writes, and what is restored from it answers as the server did."""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import postgresql_server
import pytest
from builders import ServerProcess, until
from commands import perfagent
from data_folder import place_of

pytestmark = [pytest.mark.fault, pytest.mark.real]

QUESTIONS = (
    "/runs/{done}", "/runs/{done}/series?name=loss", "/runs/{done}/export?format=jsonl", "/runs/{done}/names",
    "/runs/{done}/ranks?name=loss", "/keys",
)  # fmt: skip


def test_s11_backup_taken_while_writing_answers_the_same(server: ServerProcess, tmp_path: Path) -> None:
    """The acknowledged values of the run `busy` count up by one: what a backup holds of them is a beginning without a
    hole, and has all that was acknowledged before the backup began."""
    for step in range(200):
        log(server, "done", step, step / 7)
    made = server.admin("POST", "/keys", {"scope": "read", "name": "grafana"})
    with writing(server) as acknowledged:
        until(lambda: len(acknowledged) > 20)
        for number in range(5):  # on a busy machine a whole backup may come between two writes
            saved, before = tmp_path / f"saved-{number}.db", len(acknowledged)
            done = perfagent(tmp_path, "db", "backup", str(saved), *options(server))
            assert done.returncode == 0, done.stderr
            if len(acknowledged) > before:
                break
        assert len(acknowledged) > before, "nothing was written meanwhile: the test shows nothing"
    assert "key-pepper" in done.stdout
    assert stat.S_IMODE(saved.stat().st_mode) == 0o600
    again = perfagent(tmp_path, "db", "backup", str(saved), *options(server))
    assert again.returncode == 1 and one_line(again.stderr)

    other = ServerProcess(tmp_path / "other", env=new_place(tmp_path / "other"))
    database = other.env.get("PERFAGENT_DATABASE")
    target = ["--data", str(other.folder / "server-data"), *(["--database", database] if database else [])]
    restored = perfagent(tmp_path, "db", "restore", str(saved), *target)
    assert restored.returncode == 0, restored.stderr
    other.forked = database is not None  # a forked server would be given a database of its own
    other.start()
    try:
        for path in QUESTIONS:
            question = path.format(done=run_id(server, "done"))
            assert answer(other, question) == answer(server, question), question
        values = [row["value"] for row in other.export(run_id(other, "busy"))]
        assert values == [float(number) for number in range(len(values))]
        assert len(values) >= before
        key = {"Authorization": f"Bearer {made['key']}"}  # its digest is worth nothing without the key-pepper
        assert httpx.get(f"{other.url}/api/v1/runs", headers=key, trust_env=False).status_code == 200
    finally:
        other.stop()

    over = perfagent(tmp_path, "db", "restore", str(saved), *target)
    assert over.returncode == 1 and one_line(over.stderr)
    assert "--replace" in over.stderr or "is not empty" in over.stderr


@pytest.mark.sqlite
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_s11_what_root_restores_belongs_to_the_folders_owner(server: ServerProcess, tmp_path: Path) -> None:
    saved, bare = tmp_path / "saved.db", tmp_path / "bare.db"
    assert perfagent(tmp_path, "db", "backup", str(saved), *options(server)).returncode == 0
    done = perfagent(tmp_path, "db", "backup", str(bare), "--without-secrets", *options(server))
    assert done.returncode == 0 and "no key is valid" in done.stdout
    pepper = (server.folder / "server-data" / "key-pepper").read_bytes().strip()
    assert pepper in saved.read_bytes() and pepper not in bare.read_bytes()
    folder = tmp_path / "of-the-service"
    folder.mkdir(mode=0o700)
    os.chown(folder, 10001, 10001)
    for replace in ([], ["--replace"]):
        done = perfagent(tmp_path, "db", "restore", str(saved), "--data", str(folder), *replace)
        assert done.returncode == 0, done.stderr
        owners = {path.name: path.stat().st_uid for path in folder.iterdir()}
        assert {"perfagent.db", "key-pepper", "server.lock"} <= owners.keys()
        assert set(owners.values()) == {10001}, owners
    bare.write_bytes(b"no database" * 1000)
    server.stop()
    refused = perfagent(tmp_path, "db", "restore", str(bare), *options(server))
    assert refused.returncode == 1 and one_line(refused.stderr)
    server.start()  # nothing has changed


def one_line(text: str) -> bool:
    return len(text.strip().splitlines()) == 1 and "Traceback" not in text


@contextlib.contextmanager
def writing(server: ServerProcess) -> Iterator[list[int]]:
    """Logs to one run until the end of the block, in a thread. Gives what was acknowledged."""
    acknowledged: list[int] = []
    ends = threading.Event()

    def write() -> None:
        while not ends.is_set():
            log(server, "busy", len(acknowledged), float(len(acknowledged)))
            acknowledged.append(1)

    thread = threading.Thread(target=write)
    thread.start()
    yield acknowledged
    ends.set()
    thread.join()


def log(server: ServerProcess, run: str, step: int, value: float) -> None:
    body = {"run": run, "step": step, "metrics": {"loss": value}}
    httpx.post(f"{server.url}/api/v1/log", json=body, timeout=30, trust_env=False).raise_for_status()


def run_id(server: ServerProcess, name: str) -> str:
    [found] = [run["run"] for run in server.get("/runs")["runs"] if run["name"] == name]
    return str(found)


def answer(server: ServerProcess, path: str) -> Any:
    headers = {"Authorization": f"Bearer {server.admin_token}"}
    found = httpx.get(f"{server.url}/api/v1{path}", headers=headers, trust_env=False)
    assert found.is_success, f"{path}: {found.text[:300]}"
    if "jsonl" in path:
        return found.text
    body = found.json()
    body.pop("now", None)
    return body


def options(server: ServerProcess) -> list[str]:
    """The options that name this server's database."""
    data = server.folder / "server-data"
    database = place_of(data)["database"]
    return ["--data", str(data), *(["--database", database] if database else [])]


def new_place(folder: Path) -> dict[str, str]:
    """Variables that name an empty database for another server."""
    folder.mkdir()
    if not postgresql_server.is_wanted():
        return {}
    return {"PERFAGENT_DATABASE": postgresql_server.empty_database(f"restored_{abs(hash(folder)):x}")}
