"""`perfagent sync`: what it sends, what it says, and the status it ends with."""

from __future__ import annotations

import errno
import os
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from agent.delivery.test_spool import of_version_2
from builders import free_port, job_environment
from command_line import in_terminal
from ingest_server import IngestServer, Scripted

from perfagent.cli import _main
from perfagent.delivery import segments, sync
from perfagent.delivery.spool import Header, Spool
from perfagent.delivery.transport import HttpTransport, RecordingTransport, Reply
from perfagent.local_server import LocalServer, data_folder
from perfagent.wire import Frame, Group, decode

Sync = Callable[..., tuple[int, str]]


@pytest.fixture
def run_sync(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Sync:
    """(status, what it said) of the command with a server of its own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))

    def run(server: str, *words: str | Path) -> tuple[int, str]:
        monkeypatch.setenv("PERFAGENT_SERVER", server)
        capsys.readouterr()
        status = _main(["sync", *map(str, words)])
        said = capsys.readouterr()
        return status, said.out or said.err

    return run


class Clock:
    """Stands for the module `time` in `sync`: a pause is over at once, and counts."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(sync, "time", made)
    return made


def record(folder: Path, source: str = "a" * 32, *, frames: int = 3, run: str | None = "recorded") -> Path:
    """A recording of some frames of ten rows each; its one file of frames."""
    spool = Spool(
        folder / source, Header(source=source, project="p", rank=0, server=None, run=run, attempt=1), recording=True
    )
    for minute in range(frames):
        steps = list(range(10 * minute, 10 * minute + 10))
        times = [float(step) for step in steps]
        spool.append([Group(step=steps, time=times, monotonic=times, values={"loss": times})], [], now=60.0 * minute)
        spool.hold(now=60.0 * minute + 61)
    spool.close(final="finished")
    (path,) = (folder / source).glob("*.frames")
    return path


def test_a_recording_goes_to_a_second_server_as_it_went_to_the_first(run_sync: Sync, tmp_path: Path) -> None:
    record(tmp_path / "record")
    with IngestServer() as first, IngestServer() as second:
        for server in (first, second):
            status, said = run_sync(server.url, tmp_path / "record")
            assert (status, said) == (0, "recorded rank 0: 3 frames, 30 samples stored, 0 there already\n")
            assert sorted(server.values("loss")) == list(range(30))
        status, said = run_sync(second.url, tmp_path / "record")
        assert status == 0
        assert "nothing new for this server" in said
        assert "30 samples there already" in said


def test_a_damaged_recording_is_told_with_its_file_and_fails(run_sync: Sync, tmp_path: Path) -> None:
    path = record(tmp_path / "record")
    data = bytearray(path.read_bytes())
    data[-20] ^= 0xFF
    path.write_bytes(data)
    with IngestServer() as server:
        status, said = run_sync(server.url, tmp_path / "record")
        assert sorted(server.values("loss")) == list(range(20)), "what is whole is sent all the same"
    assert status == 1
    assert "1 file damaged" in said
    assert path.name + ".corrupt" in said


def test_a_torn_end_is_told_and_does_not_fail(run_sync: Sync, tmp_path: Path) -> None:
    path = record(tmp_path / "record")
    path.write_bytes(path.read_bytes()[:-20])
    with IngestServer() as server:
        status, said = run_sync(server.url, tmp_path / "record")
    assert status == 0
    assert "20 samples stored" in said
    assert "written in part only" in said


def test_a_folder_without_one_readable_record_makes_no_run(run_sync: Sync, tmp_path: Path) -> None:
    path = record(tmp_path / "record")
    path.write_bytes(os.urandom(500))
    with IngestServer() as server:
        status, said = run_sync(server.url, tmp_path / "record")
        assert server.frames == []
    assert status == 1
    assert "rank-" not in said
    assert str(path.parent) in said
    assert "1 file damaged" in said


def test_samples_of_a_rank_that_never_learned_its_run_get_one(run_sync: Sync, tmp_path: Path) -> None:
    record(tmp_path / "record", run=None)
    with IngestServer() as server:
        assert run_sync(server.url, tmp_path / "record")[0] == 0
        assert {frame.run for frame in server.frames} == {"rank-" + "a" * 12}


def test_a_folder_that_may_not_be_read_is_named_and_fails(
    run_sync: Sync, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(tmp_path / "record")
    closed = tmp_path / "record" / ("a" * 32)
    look = Path.iterdir

    def refused(path: Path) -> object:
        if path == closed:  # tests may run as root, who may look everywhere
            raise PermissionError(13, "Permission denied")
        return look(path)

    monkeypatch.setattr(Path, "iterdir", refused)
    status, said = run_sync("http://127.0.0.1:9", tmp_path / "record")
    assert status == 1
    assert f"{closed}: cannot be read (Permission denied)" in said
    assert "nothing to send" not in said


def test_an_empty_spool_has_nothing_to_send(run_sync: Sync) -> None:
    assert run_sync("http://127.0.0.1:9") == (0, "nothing to send\n")


def test_a_folder_without_a_recording_is_wrong_use_and_named(run_sync: Sync, tmp_path: Path) -> None:
    (tmp_path / "other" / "inner").mkdir(parents=True)
    (tmp_path / "other" / "notes.txt").write_text("no recording")
    status, said = run_sync("http://127.0.0.1:9", tmp_path / "other")
    assert status == 2
    assert f"{tmp_path / 'other'} holds no recording" in said
    assert "*.ticks, *.early or *.frames" in said


def test_a_folder_without_a_recording_does_not_keep_another_from_being_sent(run_sync: Sync, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    record(tmp_path / "record")
    with IngestServer() as server:
        status, said = run_sync(server.url, tmp_path / "empty", tmp_path / "record")
        assert sorted(server.values("loss")) == list(range(30))
    assert status == 2
    assert f"{tmp_path / 'empty'} holds no recording" in said


def test_patience_begins_anew_with_every_answer(run_sync: Sync, tmp_path: Path, clock: Clock) -> None:
    def late(_: Frame) -> Scripted:
        clock.sleep(0.3 * sync.PATIENCE_S)
        return Scripted(body=b'{"stored": 10, "duplicate": 0}', store=True)

    record(tmp_path / "record", frames=6)
    with IngestServer(rule=late) as server:
        status, said = run_sync(server.url, tmp_path / "record")
    assert status == 0, said
    assert "6 frames" in said


def test_a_server_that_is_away_costs_one_wait_and_not_one_a_source(
    run_sync: Sync, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    for letter in "abc":
        record(tmp_path / "record", letter * 32)
    tries: Counter[str] = Counter()
    post = sync.HttpTransport.post

    def counted(transport: HttpTransport, body: bytes, **more: Any) -> Reply:
        tries[decode(body).source] += 1
        return post(transport, body, **more)

    monkeypatch.setattr(sync.HttpTransport, "post", counted)
    status, said = run_sync(f"http://127.0.0.1:{free_port()}", tmp_path / "record")
    assert status == 1
    assert said.count("not complete") == 3
    first, *others = tries.values()
    assert first > 1
    assert others == [1, 1]


def test_a_server_that_is_away_is_named_at_once_and_what_to_do_at_the_end(
    run_sync: Sync, tmp_path: Path, clock: Clock
) -> None:
    record(tmp_path / "record")
    url = f"http://127.0.0.1:{free_port()}"
    status, said = run_sync(url, tmp_path / "record")
    assert status == 1
    first, last = said.splitlines()
    assert first.startswith(f"server {url}: ConnectionRefusedError")
    assert "trying again for" in first
    assert f"not complete: server {url}: ConnectionRefusedError" in last
    assert last.endswith("the same command again sends the rest")


def test_a_refused_key_is_said_once_for_all_sources_and_how_to_get_one(run_sync: Sync, tmp_path: Path) -> None:
    for letter in "abcd":
        record(tmp_path / "record", letter * 32, run=f"run-{letter}")
    with IngestServer(Scripted(status=401)) as server:
        status, said = run_sync(server.url, tmp_path / "record")
    assert status == 1
    first, second = said.splitlines()
    assert first.startswith("not sent: run-a rank 0, run-b rank 0, run-c rank 0, run-d rank 0: server ")
    assert first.endswith("status 401")
    assert "set PERFAGENT_API_KEY to a key with the ingest scope" in second
    assert "`perfagent keys create ingest`" in second
    assert "again" in second


OLD = "http://127.0.0.1:8420"


def leave(tmp_path: Path, *letters: str, server: str = OLD) -> list[Path]:
    """What dead processes left in the spool for a server."""
    folders = [tmp_path / "state" / "perfagent" / "spool" / (letter * 32) for letter in letters]
    for folder in folders:
        left = Spool(folder, Header(source=folder.name, project="p", rank=0, server=server, run="r", attempt=1))
        left.append([Group(step=[1], time=[1.0], monotonic=[1.0], values={"loss": [1.0]})], [], now=0.0)
        left.close(final="finished")
    return folders


def test_without_a_terminal_what_was_made_for_another_server_is_named_with_the_commands_for_it(
    run_sync: Sync, tmp_path: Path
) -> None:
    first, second = leave(tmp_path, "a", "b")
    with IngestServer() as server:
        status, said = run_sync(server.url)
        assert (status, server.frames) == (1, [])
        assert f"2 recordings were made for {OLD}, and not sent" in said
        assert f"perfagent sync --server {OLD}." in said and f"rm -r {first} {second}" in said
        assert f"perfagent sync --server {server.url} --yes\n" in said
        status, said = run_sync(server.url, "--server", server.url, "--yes")
        assert (status, len(server.frames)) == (0, 2), said
    assert not first.exists() and not second.exists()


@pytest.mark.parametrize(("answer", "code", "frames"), [("y\r", 0, 1), ("\r", 1, 0)])
def test_on_a_terminal_it_is_asked_whether_this_server_gets_it(
    tmp_path: Path, answer: str, code: int, frames: int
) -> None:
    (folder,) = leave(tmp_path, "a")
    with IngestServer() as server:
        ended = in_terminal(
            ["sync", "--server", server.url], job_environment(tmp_path), columns=200, asks="[y/N]", typed=answer
        )
        assert f"1 recording was made for {OLD}; send it to {server.url}? [y/N]" in ended.text
        assert (ended.code, len(server.frames)) == (code, frames)
    assert folder.exists() is not bool(frames)


def test_a_port_of_this_machine_that_refuses_is_not_waited_for_where_the_own_server_is_another(
    run_sync: Sync, tmp_path: Path, clock: Clock
) -> None:
    data_folder().mkdir(parents=True)
    LocalServer().announce("http://127.0.0.1:8720")
    wrong = f"http://127.0.0.1:{free_port()}"
    leave(tmp_path, "a", server=wrong)
    status, said = run_sync(wrong)
    assert status == 1
    assert "your server listens at http://127.0.0.1:8720: perfagent sync --server http://127.0.0.1:8720" in said
    assert clock.now == 1000.0, "not for a moment"


def test_the_own_server_is_found_at_the_port_that_it_takes_while_sync_waits(
    run_sync: Sync, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    data_folder().mkdir(parents=True)
    LocalServer().announce(f"http://127.0.0.1:{free_port()}")
    record(tmp_path / "recorded")
    with IngestServer() as server:

        def starts_again(seconds: float) -> None:
            clock.now += seconds
            LocalServer().announce(server.url)

        monkeypatch.setattr(clock, "sleep", starts_again)
        status, said = run_sync("", tmp_path / "recorded")
    assert status == 0, said
    assert server.values("loss") == {step: float(step) for step in range(30)}


def test_a_folder_of_the_spool_that_was_named_is_gone_once_it_was_sent(run_sync: Sync, tmp_path: Path) -> None:
    (folder,) = leave(tmp_path, "a")
    with IngestServer() as server:
        assert run_sync(server.url, folder)[0] == 0
        assert len(server.frames) == 1
    assert not folder.exists(), "as doctor counts what is there"


def test_a_folder_that_is_not_there_and_a_file_are_told_apart(run_sync: Sync, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert run_sync("http://127.0.0.1:9", tmp_path / "nowhere") == (
        2,
        f"perfagent sync: there is no folder {tmp_path / 'nowhere'}; give the one of PERFAGENT_RECORD, attach(record=...) or "
        "run --record\n",
    )
    status, said = run_sync("http://127.0.0.1:9", tmp_path / "file")
    assert (status, said) == (2, f"perfagent sync: {tmp_path / 'file'} is a file; give the folder of the recording\n")


def test_an_interrupted_upload_goes_on_where_it_was(
    run_sync: Sync, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(tmp_path / "record")
    with IngestServer() as server:
        post, tries = sync.HttpTransport.post, iter(range(99))

        def interrupted(*arguments: Any, **more: Any) -> Any:
            if next(tries) == 1:
                raise KeyboardInterrupt
            return post(*arguments, **more)

        monkeypatch.setattr(sync.HttpTransport, "post", interrupted)
        status, said = run_sync(server.url, tmp_path / "record")
        assert status == 130
        assert "interrupted; what was sent stays sent, and the same command again sends the rest" in said
        assert sorted(server.values("loss")) == list(range(10))
        status, said = run_sync(server.url, tmp_path / "record")
        assert (status, said) == (0, "recorded rank 0: 3 frames, 20 samples stored, 10 there already\n")
        assert sorted(server.values("loss")) == list(range(30))


def test_a_recording_that_is_still_written_fails_because_not_all_of_it_was_sent(run_sync: Sync, tmp_path: Path) -> None:
    """Else `perfagent sync DIR && rm -r DIR` would delete what nobody has."""
    record(tmp_path / "record")
    lock = Spool.open(tmp_path / "record" / ("a" * 32), recording=True)
    with IngestServer() as server:
        status, said = run_sync(server.url, tmp_path / "record")
        lock.close()
        assert status == 1
        assert "still being written by a running process, or sent by another one: skipped" in said
        assert run_sync(server.url, tmp_path / "record")[0] == 0


def test_a_spool_of_a_running_process_is_that_processes_own_concern(run_sync: Sync, tmp_path: Path) -> None:
    record(tmp_path / "state" / "perfagent" / "spool")
    lock = Spool.open(tmp_path / "state" / "perfagent" / "spool" / ("a" * 32))
    status, said = run_sync("http://127.0.0.1:9")
    lock.close()
    assert status == 0
    assert "skipped" in said


def test_a_folder_that_may_not_be_written_says_what_to_do(
    run_sync: Sync, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(tmp_path / "record")
    opened = segments.opened

    def refused(path: Path, flags: int) -> object:
        if path.name == "lock":  # tests may run as root, whom no mode keeps out
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return opened(path, flags)

    monkeypatch.setattr(segments, "opened", refused)
    status, said = run_sync("http://127.0.0.1:9", tmp_path / "record")
    assert status == 1
    assert f"{tmp_path / 'record' / ('a' * 32)}: cannot be written (Read-only file system)" in said
    assert "copy it to where you may write" in said


def test_a_recording_of_a_later_version_is_told_and_left_as_it_is(run_sync: Sync, tmp_path: Path) -> None:
    path = record(tmp_path / "record")
    later = of_version_2()
    path.write_bytes(later)
    status, said = run_sync("http://127.0.0.1:9", tmp_path / "record")
    assert status == 1
    assert f"{path.parent}: {path.name} is of version 2 of the spool" in said
    assert "upgrade perfagent" in said
    assert path.read_bytes() == later


def test_a_copy_of_a_recording_is_the_recording(run_sync: Sync, tmp_path: Path) -> None:
    record(tmp_path / "record")
    shutil.copytree(tmp_path / "record", tmp_path / "elsewhere" / "copy")
    with IngestServer() as server:
        assert run_sync(server.url, tmp_path / "record")[0] == 0
        status, said = run_sync(server.url, tmp_path / "elsewhere" / "copy")
        assert (status, "nothing new for this server" in said) == (0, True)
        assert sorted(server.values("loss")) == list(range(30))


def test_a_copy_of_what_a_killed_process_left_goes_to_a_second_server_whole(run_sync: Sync, tmp_path: Path) -> None:
    """Where it cannot be written, `sync` says to copy it. One frame of it was on its way when the process was
    killed."""
    left = Spool(tmp_path / "spool" / "s", Header(source="s", project="p", rank=0, server=None, run="r", attempt=1))
    for first in (0, 10):
        steps = list(range(first, first + 10))
        times = [float(step) for step in steps]
        left.append([Group(step=steps, time=times, monotonic=times, values={"loss": times})], [], now=0.0)
        assert first or left.next() is not None
    left.abandon()
    shutil.copytree(tmp_path / "spool", tmp_path / "copy")
    with IngestServer() as first_server, IngestServer() as second:
        for server in (first_server, second, second):
            assert run_sync(server.url, tmp_path / "copy")[0] == 0
            assert sorted(server.values("loss")) == list(range(20))
        assert first_server.stored.keys() == second.stored.keys()
        assert run_sync(first_server.url, tmp_path / "spool")[0] == 0, "the original, later"
        assert len(first_server.samples("loss")) == 20


def test_an_upload_with_a_last_moment_keeps_to_it(tmp_path: Path) -> None:
    """The watcher of `perfagent run` and the end of a process have that much time and no more."""
    path = record(tmp_path / "record")
    spool = Spool.open(path.parent, recording=True)
    transport = RecordingTransport()
    result = sync.upload(spool, transport, until=sync.time.monotonic() - 1.0)
    assert (result.complete, transport.frames) == (False, [])
    spool.close()
