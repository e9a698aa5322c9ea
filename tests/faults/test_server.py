"""Rows S02, S03, S08, S09 and S10: what the server does on a full or damaged disk, when it is stopped while it migrates,
with agents of other versions, and when its clock jumps. (More of these rows: tests/server/store/test_database.py,
tests/server/api/test_commands.py and tests/server/engine/test_scheduler.py.)"""

from __future__ import annotations

import contextlib
import lzma
import random
import sqlite3
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest
from api_builders import MSGPACK, api, frame
from builders import ServerProcess, until

from perfagent.wire import encode
from perfagent_server import schema
from perfagent_server.database.sqlite import RESERVE

pytestmark = pytest.mark.fault

OLD = Path(__file__).parents[1] / "data" / "databases" / "schema_0005_with_a_firing_alert.db.xz"


# ---- S02


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for the reserve, and some megabytes of data."""
    folder = tmp_path / "server-data"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=96m,mode=0700", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount a tmpfs")
    yield tmp_path
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.real
@pytest.mark.sqlite
def test_s02_full_disk_server_reads_deletes_and_goes_on_later(small_disk: Path) -> None:
    server = ServerProcess(small_disk).start()
    disk = small_disk / "server-data"
    try:
        acknowledged = log_until_refused(server, disk)
        assert (disk / RESERVE).exists() is False, "the reserve is given up"
        assert httpx.get(f"{server.url}/readyz", trust_env=False).status_code == 503
        runs = {run["name"]: run["run"] for run in server.get("/runs")["runs"]}
        assert stored(server, runs["kept"]) == acknowledged, "reading goes on"
        server.admin("DELETE", f"/runs/{runs['large']}")
        assert "large" not in {run["name"] for run in server.get("/runs")["runs"]}, "deleting works on a full disk"
        (disk / "filler").unlink()
        until(lambda: log(server, "kept", acknowledged) == 200, within_s=90.0, every_s=1.0, why="it did not go on")
        until(lambda: httpx.get(f"{server.url}/readyz", trust_env=False).status_code == 200, within_s=60.0)
        assert stored(server, runs["kept"]) == acknowledged + 1
    finally:
        server.stop()
    server.start()
    try:
        assert stored(server, runs["kept"]) == acknowledged + 1, "nothing that was acknowledged is lost"
    finally:
        server.stop()


def log_until_refused(server: ServerProcess, disk: Path) -> int:
    """Fills the disk from outside and logs; answers how many samples of the run `kept` were acknowledged."""
    rows = [{"run": "large", "metrics": {f"x{name}": random.random() for name in range(50)}} for _ in range(1000)]
    assert httpx.post(f"{server.url}/api/v1/log", json=rows, trust_env=False, timeout=60).status_code == 200
    acknowledged = 0
    with (disk / "filler").open("ab", buffering=0) as filler:
        end = time.monotonic() + 120
        while time.monotonic() < end:
            with contextlib.suppress(OSError):  # full: SQLite has some room left in the pages of its log
                filler.write(bytes(1 << 20))
            status = log(server, "kept", acknowledged)
            if status == 507:
                return acknowledged
            assert status == 200
            acknowledged += 1
    raise AssertionError("the disk never was full")


def log(server: ServerProcess, run: str, step: int) -> int:
    body = {"run": run, "step": step, "metrics": {"loss": float(step)}, "project": "p" * 200}
    return httpx.post(f"{server.url}/api/v1/log", json=body, trust_env=False, timeout=60).status_code


def stored(server: ServerProcess, run: str) -> int:
    return len(server.export(run))


# ---- S08


def old_database(server: ServerProcess) -> Path:
    """A database of an older version, in the data folder of this server."""
    folder = server.folder / "server-data"
    folder.mkdir(parents=True, mode=0o700)
    file = folder / "perfagent.db"
    file.write_bytes(lzma.decompress(OLD.read_bytes()))
    file.chmod(0o600)
    return file


# ---- S09


def test_s09_unknown_fields_are_accepted_versions_refused(tmp_path: Path) -> None:
    sent = msgspec.msgpack.decode(encode(frame({"loss": [1.0]})))
    sent["a field of the future"] = {"deep": [1, 2]}
    sent["groups"][0]["another"] = b"xx"
    sent["events"] = [{"kind": "of the future", "time": 1.7e9, "data": {"x": 1}, "more": 1}]
    with api(tmp_path) as client:
        answer = client.post("/api/v1/ingest", content=msgspec.msgpack.encode(sent), headers=MSGPACK)
        assert (answer.status_code, answer.json()["stored"]) == (200, 1), answer.text
        answer = client.post("/api/v1/ingest", content=msgspec.msgpack.encode({**sent, "version": 99}), headers=MSGPACK)
        assert answer.status_code in (400, 422)
        assert "99" in answer.text
        assert "upgrade" in answer.text


@pytest.mark.real
@pytest.mark.sqlite
def test_s09_older_database_is_upgraded_and_newer_refused(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path, forked=False)
    file = old_database(server)
    server.start()
    server.stop()
    with sqlite3.connect(file) as connection:
        assert connection.execute("SELECT version_num FROM alembic_version").fetchone() == (schema.head(),)
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    connection.close()
    before = file.read_bytes()
    server.start(wait=False)
    assert server.process is not None
    assert server.process.wait(timeout=60) != 0
    for word in ("perfagent.db", "'9999'", "upgrade perfagent"):
        assert word in server.log
    assert file.read_bytes() == before, "it is left alone"
