from __future__ import annotations

import mmap
import multiprocessing
import os
import resource
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest

from perfagent.samplers.process import ProcessReader, WorkerReader
from perfagent.wire import CATALOGUE


def test_this_process_is_measured() -> None:
    reader = ProcessReader()
    reader.read(0.0)
    before, found, after = psutil.Process().num_threads(), reader.read(10.0), psutil.Process().num_threads()
    low, high = sorted((before, after))  # a thread of an earlier test may end meanwhile
    assert low <= found["process/threads"] <= high
    assert abs(found["process/rss_bytes"] - psutil.Process().memory_info().rss) < 20 * 2**20
    assert found["process/cpu_pct"] >= 0
    assert found["process/disk_write_bytes_per_s"] >= 0
    assert found.keys() - CATALOGUE.keys() == set()


def test_cpu_is_told_to_the_microsecond() -> None:
    reader = ProcessReader()
    begin = resource.getrusage(resource.RUSAGE_SELF)
    reader.read(0.0)
    sum(number * number for number in range(200_000))
    told = reader.read(100.0)["process/cpu_pct"]
    end = resource.getrusage(resource.RUSAGE_SELF)
    most = end.ru_utime + end.ru_stime - begin.ru_utime - begin.ru_stime
    assert 0 < told <= most + 1e-4


def test_pages_of_a_mapped_file_are_told_apart_and_shared_memory_is_no_file(tmp_path: Path) -> None:
    size = 32 * 2**20
    reader = ProcessReader()
    before = reader.read(0.0)
    (tmp_path / "data.bin").write_bytes(bytes(size))
    with (tmp_path / "data.bin").open("rb") as file:
        mapped = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
    read = sum(mapped[place] for place in range(0, size, 4096))
    shared = mmap.mmap(-1, size)
    shared.write(b"x" * size)
    after = reader.read(1.0)
    assert read == 0
    assert after["process/rss_file_bytes"] - before["process/rss_file_bytes"] == pytest.approx(size, rel=0.1)
    assert after["process/rss_bytes"] - before["process/rss_bytes"] == pytest.approx(2 * size, rel=0.1)
    mapped.close()
    shared.close()


@pytest.mark.fault
def test_a22_what_may_not_be_read_is_absent(tmp_path: Path) -> None:
    assert set(ProcessReader(tmp_path).read(1.0)) == set()
    assert set(ProcessReader(tmp_path).read(2.0)) == set()


def _work(connection: Connection) -> None:
    connection.recv()
    held = bytearray(16 * 2**20)
    sum(number * number for number in range(3_000_000))
    connection.send(len(held))
    connection.recv()


@pytest.fixture(params=["fork", "spawn", "forkserver"])
def worker(request: pytest.FixtureRequest) -> Iterator[tuple[Any, Connection]]:
    context: Any = multiprocessing.get_context(request.param)
    here, there = context.Pipe()
    process = context.Process(target=_work, args=(there,), daemon=True)
    process.start()
    yield process, here
    process.kill()
    process.join()


def test_workers_of_every_start_method_are_counted_with_their_cpu_and_memory(worker: tuple[Any, Connection]) -> None:
    process, connection = worker
    reader = WorkerReader()
    first = reader.read(0.0)
    assert first["process/workers"] == 1
    assert "process/workers_cpu_pct" not in first
    connection.send("work")
    assert connection.recv() == 16 * 2**20
    told = reader.read(10.0)
    assert told["process/workers_cpu_pct"] > 0
    assert told["process/workers_rss_bytes"] > 16 * 2**20
    assert abs(told["process/workers_rss_bytes"] - psutil.Process(process.pid).memory_info().rss) < 8 * 2**20
    assert 0 < told["process/workers_rss_file_bytes"] < told["process/workers_rss_bytes"]
    assert told.keys() - CATALOGUE.keys() == set()
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT) if process._popen.method == "fork" else process.join()
    assert reader.read(20.0) == {"process/workers": 0}


def test_where_nothing_was_started_nothing_is_told() -> None:
    assert not multiprocessing.active_children()
    assert WorkerReader().read(0.0) == {}
