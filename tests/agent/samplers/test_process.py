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
from builders import until
from ingest_server import IngestServer

from perfagent.agent_config import AgentConfig
from perfagent.delivery.handoff import Sender
from perfagent.identity import Identity
from perfagent.samplers.process import ProcessReader, WorkerReader
from perfagent.samplers.sampler import Sampler
from perfagent.samplers.worker_memory import WorkerMemory
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


SHARED = [bytearray(2**20) for _ in range(64)]


def _copies(connection: Connection) -> None:
    for _ in range(2):
        connection.recv()
        for held in SHARED[:32]:
            for page in range(0, len(held), 4096):
                held[page] = 1
        connection.send("copied")


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="only Linux tells it")
def test_pages_that_a_forked_worker_copies_become_memory_of_its_own() -> None:
    for held in SHARED:
        held[:] = bytes(len(held))
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe() for _ in range(2)]
    workers = [context.Process(target=_copies, args=(there,), daemon=True) for _, there in pipes]
    for worker in workers:
        worker.start()
    told: list[dict[str, float]] = []
    now = [0.0]
    memory = WorkerMemory(told.append, clock=lambda: now[0])
    resident = WorkerReader()

    def measured() -> tuple[float, float]:
        for _ in workers:
            now[0] += 1e4
            assert memory.poll()
        return told[-1]["process/workers_pss_bytes"], resident.read(now[0])["process/workers_rss_bytes"]

    try:
        shared, resident_before = measured()
        for here, _ in pipes:
            here.send("copy")
            assert here.recv() == "copied"
        copied, resident_after = measured()
    finally:
        for worker in workers:
            worker.kill()
            worker.join()
    # two workers and this process share a page: of it each has a third, after the copy all
    assert copied - shared == pytest.approx(2 * 32 * 2**20 * 2 / 3, rel=0.1)
    assert abs(resident_after - resident_before) < 8 * 2**20
    assert told[-1].keys() <= CATALOGUE.keys()


def test_the_memory_of_workers_is_asked_for_as_seldom_as_it_costs(worker: tuple[Any, Connection]) -> None:
    told: list[dict[str, float]] = []
    now, spent = [0.0], iter(range(100))
    memory = WorkerMemory(told.append, clock=lambda: now[0], spent=lambda: 0.05 * next(spent))
    for second in range(60):
        now[0] = float(second)
        assert memory.poll()
    assert len(told) == 3, "50 ms each, and 0.2 % of the time"


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="only Linux tells it")
@pytest.mark.parametrize("worker", ["fork"], indirect=True)
def test_slow_readings_of_workers_and_disks_reach_the_server(worker: tuple[Any, Connection], tmp_path: Path) -> None:
    with IngestServer() as server:
        config = AgentConfig(state_dir=tmp_path, server=server.url, sample_s=0.2)
        sender = Sender(config, Identity(project="p", run="r", attempt=1))
        Sampler(sender, step=lambda: 1, device=lambda: None, environ={}).install()
        sender.start()
        for name in ("process/workers_pss_bytes", "disk/spool_free_bytes"):
            until(lambda name=name: server.samples(name), why=f"no {name} has come")  # type: ignore[misc]
        sender.close("finished")


def test_where_the_system_does_not_tell_the_memory_of_workers_it_is_asked_once(
    worker: tuple[Any, Connection], tmp_path: Path
) -> None:
    told: list[dict[str, float]] = []
    assert not WorkerMemory(told.append, tmp_path).poll()
    assert told == []
