"""`perfagent sync`: what it sends, what it says, and the status it ends with."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from builders import free_port
from ingest_server import IngestServer, Scripted
from ticks import tick_of

from perfagent.cli import _main
from perfagent.delivery import upload
from perfagent.delivery.spool import Header, Spool
from perfagent.delivery.transport import HttpTransport, Reply
from perfagent.wire import Group, decode
from perfagent_client import sync

pytestmark = pytest.mark.real

Sync = Callable[..., tuple[int, str]]
NOBODY = "http://127.0.0.1:9"
SOURCE = "a" * 32


@pytest.fixture
def run_sync(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Sync:
    """(status, what it said) of the command with a server of its own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))

    def run(server: str | IngestServer, *words: str | Path) -> tuple[int, str]:
        monkeypatch.setenv("PERFAGENT_SERVER", server if isinstance(server, str) else server.url)
        capsys.readouterr()
        status = _main(["sync", *map(str, words)])
        said = capsys.readouterr()
        return status, said.out or said.err

    return run


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stands for the module `time` in what sends: a pause is over at once, and counts."""
    made = SimpleNamespace(now=1000.0)
    made.monotonic, made.sleep = lambda: made.now, lambda seconds: setattr(made, "now", made.now + seconds)
    for module in (sync, upload):
        monkeypatch.setattr(module, "time", made)
    return made


def record(folder: Path, source: str = SOURCE, *, frames: int = 3, run: str | None = "recorded") -> Path:
    """A recording of some frames of ten rows each; its one file of frames."""
    header = Header(source=source, project="p", rank=0, server=None, run=run, attempt=1)
    spool = Spool(folder / source, header, recording=True)
    for minute in range(frames):
        spool.append(*tick_of(rows(10 * minute)), now=60.0 * minute)
        spool.hold(now=60.0 * minute + 61)
    spool.close(final="finished")
    (path,) = (folder / source).glob("*.frames")
    return path


def rows(first: int) -> list[Group]:
    steps = list(range(first, first + 10))
    times = [float(step) for step in steps]
    return [Group(step=steps, time=times, monotonic=times, values={"loss": times})]


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    record(tmp_path / "record")
    return tmp_path / "record"


def test_recording_goes_to_a_second_server_as_to_the_first(run_sync: Sync, recording: Path) -> None:
    copied = recording.with_name("copy")
    shutil.copytree(recording, copied)
    with IngestServer() as first, IngestServer() as second:
        for server in (first, second):
            assert run_sync(server, recording) == (0, "recorded rank 0: 3 frames, 30 samples stored, 0 there already\n")
            assert sorted(server.values("loss")) == list(range(30))
        for folder in (recording, copied):  # a copy of a recording is the recording
            status, said = run_sync(second, folder)
            assert status == 0
            assert "nothing new for this server" in said
            assert "30 there already" in said


DAMAGE: dict[str, tuple[Callable[[bytes], bytes], int, int, str]] = {
    # name: (what becomes of the file, status, rows that are sent, what is said)
    "damaged": (lambda data: data[:-20] + bytes([data[-20] ^ 0xFF]) + data[-19:], 1, 20, "1 file in "),
    "torn": (lambda data: data[:-20], 0, 20, "written in part only"),
    "nonsense": (lambda data: os.urandom(500), 1, 0, "1 file in "),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_told_and_what_is_whole_is_sent(run_sync: Sync, recording: Path, case: str) -> None:
    damage, code, count, word = DAMAGE[case]
    (path,) = recording.rglob("*.frames")
    path.write_bytes(damage(path.read_bytes()))
    with IngestServer() as server:
        status, said = run_sync(server, recording)
        assert sorted(server.values("loss")) == list(range(count))
        assert bool(server.frames) is bool(count), "a folder without one readable record makes no run"
    assert (status, word in said) == (code, True), said
    assert "rank-" not in said


# ---- wrong use


def test_what_holds_no_recording_is_wrong_use_and_named(run_sync: Sync, tmp_path: Path, recording: Path) -> None:
    assert run_sync(NOBODY) == (0, "nothing to send\n")
    (tmp_path / "other" / "inner").mkdir(parents=True)
    (tmp_path / "file").write_text("")
    for name, word in (("other", "holds no recording"), ("nowhere", "No such file"), ("file", "Not a directory")):
        status, said = run_sync(NOBODY, tmp_path / name)
        assert status == 2
        assert word in said
        assert str(tmp_path / name) in said
    with IngestServer() as server:
        status, said = run_sync(server, tmp_path / "other", recording)
        assert sorted(server.values("loss")) == list(range(30)), "another one is sent all the same"
    assert status == 2
    assert f"{tmp_path / 'other'} holds no recording" in said


# ---- a server that is slow, away or refuses


def test_server_that_is_away_is_told_at_once_and_waited_for_once(run_sync, tmp_path, monkeypatch, clock):
    for letter in "abc":
        record(tmp_path / "record", letter * 32)
    tries: Counter[str] = Counter()
    post = HttpTransport.post

    def counted(transport: HttpTransport, body: bytes, **more: Any) -> Reply:
        tries[decode(body).source] += 1
        return post(transport, body, **more)

    monkeypatch.setattr(HttpTransport, "post", counted)
    url = f"http://127.0.0.1:{free_port()}"
    status, said = run_sync(url, tmp_path / "record")
    first, *others = tries.values()
    assert (status, first > 1, others) == (1, True, [1, 1]), "one wait a source"
    head, *ends = said.splitlines()
    assert head.startswith(f"server {url}: ConnectionRefusedError") and "trying again" in head
    assert [f"not complete: server {url}" in end for end in ends] == [True] * 3
    assert "the same command again" in ends[-1]


def test_refused_key_is_told_once_and_how_to_get_one(run_sync: Sync, tmp_path: Path) -> None:
    for letter in "abcd":
        record(tmp_path / "record", letter * 32, run=f"run-{letter}")
    with IngestServer(Scripted(status=401)) as server:
        status, said = run_sync(server, tmp_path / "record")
    assert status == 1
    first, second = said.splitlines()
    assert all(
        word in first for word in ("run-a", "status 401", "PERFAGENT_API_KEY", "perfagent keys create ingest")
    ), first
    assert second.endswith(" ".join(str(tmp_path / "record" / (letter * 32)) for letter in "bcd"))


# ---- what was meant for another server, or is in use

OLD = "http://127.0.0.1:8420"


def leave(tmp_path: Path, *letters: str, server: str = OLD) -> list[Path]:
    """What dead processes left in the spool for a server."""
    folders = [tmp_path / "state" / "perfagent" / "spool" / (letter * 32) for letter in letters]
    for folder in folders:
        left = Spool(folder, Header(source=folder.name, project="p", rank=0, server=server, run="r", attempt=1))
        left.append(*tick_of(rows(1)), now=0.0)
        left.close(final="finished")
    return folders


def test_what_was_made_for_another_server_is_named_with_commands(run_sync: Sync, tmp_path: Path) -> None:
    first, second = leave(tmp_path, "a", "b")
    with IngestServer() as server:
        status, said = run_sync(server)
        assert (status, server.frames) == (1, [])
        commands = f"perfagent sync --server {OLD}", f"rm -r {first} {second}", f"{server.url} --yes"
        assert all(word in said for word in ("2 recordings", *commands)), said
        status, said = run_sync(server, "--server", server.url, "--yes")
        assert (status, len(server.frames)) == (0, 2), said
    assert not first.exists() and not second.exists()


def test_recording_in_use_fails_and_a_spool_in_use_does_not(run_sync, tmp_path, recording):
    """Else `perfagent sync DIR && rm -r DIR` would delete what nobody has."""
    lock = Spool.open(recording / SOURCE, recording=True)
    with IngestServer() as server:
        status, said = run_sync(server, recording)
        lock.close()
        assert (status, "skipped" in said) == (1, True)
        assert run_sync(server, recording)[0] == 0
    spools = tmp_path / "state" / "perfagent" / "spool"
    record(spools)
    lock = Spool.open(spools / SOURCE)
    status, said = run_sync(NOBODY)
    lock.close()
    assert (status, "skipped" in said) == (0, True)
