"""The figures of systems without /proc: psutil's, which works on Linux too, where both must agree."""

from __future__ import annotations

import multiprocessing
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from perfagent.agent_config import AgentConfig
from perfagent.delivery.handoff import Sender
from perfagent.delivery.transport import RecordingTransport
from perfagent.identity import Identity
from perfagent.pids import process_start
from perfagent.samplers.cgroup import ControlGroup
from perfagent.samplers.counters import of_system
from perfagent.samplers.host import HostReader
from perfagent.samplers.process import ProcessReader, WorkerReader
from perfagent.samplers.psutil_counters import PsutilHost, PsutilProcess, PsutilWorkers
from perfagent.samplers.sampler import Sampler
from perfagent.wire import CATALOGUE

pytestmark = pytest.mark.skipif(not Path("/proc/stat").exists(), reason="compares with /proc")
NO_GROUP = ControlGroup(usage=None, limit_bytes=None, inactive=None, events=None, cores=None)


def test_the_host_is_measured_as_from_proc() -> None:
    """Counters at nearly the same moment, between two readings of /proc where they grow."""
    proc, ours = of_system()[0], PsutilHost()
    first, cpu, last = proc.cpu(), ours.cpu(), proc.cpu()
    assert first is not None and cpu is not None and last is not None
    ticks = os.sysconf("SC_CLK_TCK")
    for part in ("idle", "waiting", "total"):
        low, high = sorted((getattr(first, part), getattr(last, part)))
        assert low / ticks - 0.5 <= getattr(cpu, part) <= high / ticks + 0.5, part
    memory, reference = ours.memory(), proc.memory()
    assert memory is not None and reference is not None
    assert memory.total == reference.total
    assert abs(memory.available - reference.available) < 0.05 * memory.total
    disks_before, disks, disks_after = proc.disks(), ours.disks(), proc.disks()
    if disks_before is not None and disks_after is not None:
        assert disks is not None
        # psutil counts device mappers and RAID, too, which lie on these disks
        assert disks.read >= disks_before.read
        assert disks.written >= disks_before.written
        assert disks.busy_ms is None


def test_bytes_that_stay_on_the_host_are_no_network_traffic() -> None:
    """A megabyte through the loopback interface. Other programs may use the network meanwhile, so the least of five
    counts."""
    ours, grown = PsutilHost(), []
    for _ in range(5):
        before = ours.links()
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
            there, _ = server.accept()
            with there:
                for _ in range(64):
                    client.sendall(bytes(2**14))
                    received = 0
                    while received < 2**14:
                        received += len(there.recv(2**14))
        after = ours.links()
        if before is None or after is None:
            return  # a sandbox whose only interface is loopback
        grown.append(after.received - before.received)
    assert min(grown) < 2**19


def test_rates_and_shares_come_from_the_same_reader() -> None:
    reader = HostReader(group=NO_GROUP, counters=PsutilHost())
    first = reader.read(0.0)
    assert {"host/memory_total_bytes", "host/memory_used_bytes", "host/load1", "host/cores"} <= set(first)
    assert "host/cpu_pct" not in first
    end = time.process_time() + 0.05
    while time.process_time() < end:
        pass
    second = reader.read(10.0)
    assert 0.0 < second["host/cpu_pct"] <= 100.0
    proc = HostReader(group=NO_GROUP)
    proc.read(0.0)
    expected = set(proc.read(10.0)) - {"host/disk_busy_pct"}
    assert {name for name in expected if not name.endswith("_pressure_pct")} <= set(second)
    assert set(second) <= set(CATALOGUE)
    reader.close()


def test_this_process_is_measured_as_from_proc(tmp_path: Path) -> None:
    ours, proc = ProcessReader(counters=PsutilProcess()), ProcessReader()
    ours.read(0.0)
    before = proc.read(0.0)
    with (tmp_path / "written").open("wb") as file:
        file.write(bytes(2**20))
        file.flush()
        os.fsync(file.fileno())
    found, reference = ours.read(10.0), proc.read(10.0)
    assert set(found) == set(reference) - {"process/rss_file_bytes"}
    low, high = sorted((before["process/threads"], reference["process/threads"]))  # an earlier test's thread may end
    assert low <= found["process/threads"] <= high
    assert abs(found["process/rss_bytes"] - reference["process/rss_bytes"]) < 8 * 2**20
    if "process/disk_write_bytes_per_s" in reference:
        assert found["process/disk_write_bytes_per_s"] == pytest.approx(
            reference["process/disk_write_bytes_per_s"], abs=1e5
        )
    ours.close()
    assert ours.memory() == {}


def _work(connection: Connection) -> None:
    connection.recv()
    held = bytearray(16 * 2**20)
    sum(number * number for number in range(1_000_000))
    connection.send(len(held))
    connection.recv()


@pytest.fixture
def worker() -> Iterator[tuple[Any, Connection]]:
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_work, args=(there,), daemon=True)
    process.start()
    yield process, here
    process.kill()
    process.join()


def test_workers_are_counted_with_their_cpu_and_memory_until_they_end(worker: tuple[Any, Connection]) -> None:
    process, connection = worker
    reader = WorkerReader(counters=PsutilWorkers())
    assert reader.read(0.0)["process/workers"] == 1
    connection.send("work")
    assert connection.recv() == 16 * 2**20
    found, reference = reader.read(10.0), WorkerReader().read(10.0)
    assert found["process/workers_cpu_pct"] > 0
    assert abs(found["process/workers_rss_bytes"] - reference["process/workers_rss_bytes"]) < 8 * 2**20
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # a zombie
    assert reader.read(20.0) == {"process/workers": 0}
    reader.close()


def test_without_proc_a_run_has_the_figures_of_host_and_process(tmp_path: Path, worker: tuple[Any, Connection]) -> None:
    moment = [100.0]
    sender = Sender(
        AgentConfig(state_dir=tmp_path), Identity(project="p", run="r", attempt=1), transport=RecordingTransport()
    )
    sampler = Sampler(
        sender, step=lambda: 1, device=lambda: None, environ={}, proc=tmp_path / "none", clock=lambda: moment[0]
    )
    for _ in range(2):
        sampler.poll()
        moment[0] += 10.0
    row: Any = sender.rows[-1]
    found = dict(zip(row[3], row[4], strict=True))
    assert {
        "host/memory_used_bytes", "host/memory_total_bytes", "host/load1", "host/cores",
        "process/rss_bytes", "process/cpu_pct", "process/threads", "process/workers", "process/workers_rss_bytes",
    } <= set(found)  # fmt: skip
    assert found["process/workers"] == 1
    sampler.resign()


def test_without_proc_a_process_is_known_by_its_number_and_its_start(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        own, started = process_start(os.getpid(), tmp_path), process_start(child.pid, tmp_path)
        assert 0 < own < started <= 1000 * (time.time() + 1)
        assert process_start(child.pid, tmp_path) == started
        child.kill()
    assert process_start(child.pid, tmp_path) == 0


def test_where_proc_is_there_psutil_is_not_imported() -> None:
    program = (
        "import sys; from perfagent.samplers.counters import of_system; of_system(); print('psutil' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"
