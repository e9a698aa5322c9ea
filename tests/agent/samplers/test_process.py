"""The figures of a process and of the workers it started, from /proc, beside psutil's."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest

from perfagent.samplers.process import ProcessReader, WorkerMemory, WorkerReader
from perfagent.wire import CATALOGUE

needs_smaps = pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="only Linux tells it")
MIB = 2**20


def threads() -> int:
    return psutil.Process().num_threads()


def test_this_process_is_measured(tmp_path: Path) -> None:
    reader = ProcessReader()
    reader.read(0.0)
    with (tmp_path / "written").open("wb") as file:
        file.write(bytes(MIB))
        file.flush()
        os.fsync(file.fileno())
    before, found, after = threads(), reader.read(10.0), threads()
    low, high = sorted((before, after))  # a thread of an earlier test may end meanwhile
    assert low <= found["process/threads"] <= high
    assert abs(found["process/rss_bytes"] - psutil.Process().memory_info().rss) < 20 * MIB
    assert found["process/cpu_pct"] >= 0
    assert found["process/disk_write_bytes_per_s"] >= 0
    assert 0 < found["process/rss_file_bytes"] < found["process/rss_bytes"]
    assert found.keys() <= CATALOGUE.keys()


# ---- workers

HELD = [bytearray(MIB) for _ in range(64)]


def work(connection: Connection) -> None:
    """Copies half of what it shares with its parent, and computes."""
    while connection.recv():
        for block in HELD[:32]:
            for page in range(0, len(block), 4096):
                block[page] = 1
        sum(number * number for number in range(1_000_000))
        connection.send("done")


@contextlib.contextmanager
def workers(method: str, count: int = 1) -> Iterator[tuple[list[Any], Callable[[], None]]]:
    """Processes that wait for work, and a call that has them do it."""
    context: Any = multiprocessing.get_context(method)
    pipes = [context.Pipe() for _ in range(count)]
    processes = [context.Process(target=work, args=(there,), daemon=True) for _, there in pipes]
    for process in processes:
        process.start()

    def do_work() -> None:
        for here, _ in pipes:
            here.send("work")
            assert here.recv() == "done"

    try:
        yield processes, do_work
    finally:
        for process in processes:
            process.kill()
            process.join()


@pytest.mark.real
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_count_with_cpu_and_memory_until_they_end(method: str) -> None:
    reader = WorkerReader()
    with workers(method) as ((process,), do_work):
        first = reader.read(0.0)
        assert first["process/workers"] == 1
        assert "process/workers_cpu_pct" not in first
        do_work()
        told = reader.read(10.0)
        assert told["process/workers_cpu_pct"] > 0
        assert told["process/workers_rss_bytes"] > 32 * MIB
        assert abs(told["process/workers_rss_bytes"] - psutil.Process(process.pid).memory_info().rss) < 8 * MIB
        assert 0 < told["process/workers_rss_file_bytes"] < told["process/workers_rss_bytes"]
        assert told.keys() <= CATALOGUE.keys()
        process.kill()
        if method == "fork":
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # a zombie
        else:
            process.join()
        assert reader.read(20.0) == {"process/workers": 0}


@pytest.mark.real
def test_workers_count_from_the_first_and_between_epochs() -> None:
    reader = WorkerReader()
    assert reader.read(0.0) == {}
    with workers("fork", 2):
        assert reader.read(1.0)["process/workers"] == 2
        assert reader.read(3.0) == {}
    assert [reader.read(now)["process/workers"] for now in (6.0, 11.0)] == [2, 0]


@needs_smaps
@pytest.mark.real
def test_pages_that_forked_workers_copy_become_their_own() -> None:
    for block in HELD:
        block[:] = bytes(len(block))
    told, now = [dict[str, float]()], [0.0]
    memory, resident = WorkerMemory(told.append, clock=lambda: now[0]), WorkerReader()

    def measured() -> tuple[float, float]:
        for _ in range(2):
            now[0] += 1e4
            assert memory.poll()
        return told[-1]["process/workers_pss_bytes"], resident.read(now[0])["process/workers_rss_bytes"]

    with workers("fork", count=2) as (_, do_work):
        shared, resident_before = measured()
        do_work()
        copied, resident_after = measured()
    # two workers and this process share a page: of it each has a third, after the copy all
    assert copied - shared == pytest.approx(2 * 32 * MIB * 2 / 3, rel=0.1)
    assert abs(resident_after - resident_before) < 8 * MIB
    assert told[-1].keys() <= CATALOGUE.keys()
