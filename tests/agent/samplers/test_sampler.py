from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_nvml import FakeGpu, FakeNvml

from perfagent.agent_config import AgentConfig
from perfagent.delivery.handoff import Sender
from perfagent.delivery.transport import RecordingTransport
from perfagent.identity import Identity
from perfagent.samplers.cgroup import ControlGroup
from perfagent.samplers.gpu.nvml import load
from perfagent.samplers.host import HostReader
from perfagent.samplers.kernel_file import KernelFile
from perfagent.samplers.sampler import Sampler

NO_GROUP = ControlGroup(usage=None, limit_bytes=None, inactive=None, events=None, cores=None)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make(
    folder: Path,
    *found: FakeGpu,
    environ: dict[str, str] | None = None,
    host: HostReader | None = None,
    device: Callable[[], int | None] | None = lambda: 0,
    **who: Any,
) -> tuple[Sampler, Sender, Clock]:
    clock = Clock()
    identity = Identity(project="p", run="r", attempt=1, **who)
    sender = Sender(AgentConfig(state_dir=folder), identity, transport=RecordingTransport())
    library = FakeNvml(*found).load if found else load
    known = {"device": device} if device is not None else {}
    sampler = Sampler(sender, step=lambda: 7, library=library, environ=environ or {}, host=host, clock=clock, **known)
    return sampler, sender, clock


def latest(sender: Sender) -> dict[str, float]:
    row: Any = sender.rows[-1]
    return dict(zip(row[3], row[4], strict=True))


def test_a_row_a_second_with_the_step_in_progress(tmp_path: Path) -> None:
    sampler, sender, clock = make(tmp_path)
    for _ in range(25):
        sampler.poll()
        clock.now += 0.2
    assert len(sender.rows) == 5
    row: Any = sender.rows[-1]
    assert row[0] == 7
    assert row[2] == pytest.approx(104.0)
    assert {"process/cpu_pct", "host/memory_used_bytes"} <= set(latest(sender))


def test_rows_of_one_shape_share_one_tuple_of_names(tmp_path: Path) -> None:
    sampler, sender, clock = make(tmp_path)
    for _ in range(8):
        sampler.poll()
        clock.now += 1.0
    rows: list[Any] = list(sender.rows)
    # the kernel's clock ticks every 10 ms: between two ticks there is no host/cpu_pct
    shapes = [row[3] for row in rows]
    assert len(set(shapes)) < len(shapes)
    assert all(one is other for one in shapes for other in shapes if one == other)


class Cuda:
    """Stands for torch.cuda where it is in use, on the first device."""

    is_initialized = staticmethod(lambda: True)
    device_count = staticmethod(lambda: 2)

    @staticmethod
    def memory_stats_as_nested_dict(device: int) -> dict[str, Any]:
        return {"allocated_bytes": {"all": {"current": 3}}, "reserved_bytes": {"all": {"current": 0 if device else 5}}}

    @staticmethod
    def get_per_process_memory_fraction(device: int) -> float:
        return 1.0


def test_headroom_needs_a_driver_that_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    gpu = FakeGpu(memory=(40, 100))
    sampler, sender, clock = make(tmp_path, gpu)
    sampler.poll_gpu()
    monkeypatch.setattr(torch, "cuda", Cuda)
    sampler.poll()
    assert latest(sender)["cuda/headroom_bytes"] == 60.0 + 2.0
    gpu.hanging = True
    thread = threading.Thread(target=sampler.poll_gpu)
    thread.start()
    assert gpu.entered.wait(20)
    clock.now += 3.0
    sampler.poll()
    told = latest(sender)
    gpu.release.set()
    thread.join()
    assert told["cuda/allocated_bytes"] == 3.0
    assert "cuda/headroom_bytes" not in told


def test_a_process_knows_its_gpu_before_its_first_step(
    tmp_path: Path, record: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    class Second(Cuda):
        @staticmethod
        def memory_stats_as_nested_dict(device: int) -> dict[str, Any]:
            return Cuda.memory_stats_as_nested_dict(1 - device)

        @staticmethod
        def get_device_properties(device: int) -> SimpleNamespace:
            return SimpleNamespace(uuid=boards[device].uuid)

    boards = [FakeGpu(uuid=f"GPU-{n}", utilization=(10 * n, 0)) for n in range(2)]
    recorded = record()
    recorded.sender.drain()
    monkeypatch.setattr(torch, "cuda", Second)
    for poll in recorded.sender.sources:
        poll()
    sampler, sender, _ = make(tmp_path, *boards, device=None)
    assert sampler.poll_gpu()
    monkeypatch.undo()
    assert [
        values["cuda/reserved_bytes"] for _, values in recorded.sender.drain() if "cuda/reserved_bytes" in values
    ] == [5.0]
    told = {name: value for row in sender.rows for name, value in zip(row[3], row[4], strict=True)}
    assert (told["gpu/utilization_pct"], told["node_gpu0/utilization_pct"]) == (10.0, 0.0)


def test_gpus_are_told_in_rows_of_their_own_with_the_moment_they_were_read(tmp_path: Path) -> None:
    sampler, sender, clock = make(tmp_path, FakeGpu(utilization=(40, 0)))
    assert sampler.poll_gpu()
    assert latest(sender)["gpu/utilization_pct"] == 40.0
    row: Any = sender.rows[-1]
    assert (row[0], row[2]) == (7, clock.now)
    (told,) = sender.events
    assert (told.kind, told.data["what"]) == ("gpu", "found")


def test_without_a_gpu_there_are_no_gpu_series_and_a_reason_is_told(tmp_path: Path) -> None:
    sampler, sender, _ = make(tmp_path)
    assert not sampler.poll_gpu(), "it need not be asked again"
    sampler.poll()
    assert not any("gpu" in name for name in latest(sender))
    (told,) = sender.events
    assert told.data["what"] == "unavailable"
    assert told.data["reason"]


def test_other_gpus_of_the_node_are_sent_by_the_elected_rank_only(tmp_path: Path) -> None:
    found = [FakeGpu(uuid=f"GPU-{n}", utilization=(n, 0)) for n in range(4)]
    environ = {"LOCAL_WORLD_SIZE": "2"}
    first, first_sender, _ = make(tmp_path, *found, environ=environ, rank=0, local_rank=0, world_size=2, job_key="job")
    second, second_sender, _ = make(
        tmp_path, *found, environ=environ, rank=1, local_rank=1, world_size=2, job_key="job"
    )
    second._device = lambda: 1
    for sampler in (first, second):
        sampler.poll()
        sampler.poll_gpu()
    assert {name for name in latest(first_sender) if name.endswith("utilization_pct")} == {
        "gpu/utilization_pct",
        "node_gpu2/utilization_pct",
        "node_gpu3/utilization_pct",
    }
    assert latest(second_sender)["gpu/utilization_pct"] == 1.0
    everything = {name for row in second_sender.rows for name in row[3]}  # type: ignore[union-attr]
    assert not any(name.startswith(("host/", "node_gpu")) for name in everything)
    assert any(name.startswith("host/") for row in first_sender.rows for name in row[3])  # type: ignore[union-attr]


def test_where_memory_is_nearly_used_up_every_tick_tells_it(tmp_path: Path) -> None:
    proc = tmp_path / "proc"
    proc.mkdir()
    (proc / "meminfo").write_text("MemTotal: 1000 kB\nMemFree: 50 kB\nMemAvailable: 500 kB\n")
    sampler, sender, clock = make(tmp_path, host=HostReader(proc, NO_GROUP))

    def told() -> int:
        for _ in range(5):
            sampler.poll()
            clock.now += 0.2
        rows: list[Any] = [sender.rows.popleft() for _ in range(len(sender.rows))]
        return sum("host/memory_used_bytes" in row[3] for row in rows)

    assert told() == 1
    (proc / "meminfo").write_text("MemTotal: 1000 kB\nMemFree: 50 kB\nMemAvailable: 100 kB\n")
    assert told() == 5


RANK_0 = """
import sys
from pathlib import Path
from perfagent.agent_config import AgentConfig
from perfagent.delivery.handoff import Sender
from perfagent.identity import Identity
from perfagent.samplers.sampler import Sampler
who = Identity(project="p", run="r", attempt=1, world_size=2, job_key="job")
sampler = Sampler(Sender(AgentConfig(state_dir=Path(sys.argv[1])), who), step=lambda: 0)
print(sampler._elected, flush=True)
sys.stdin.read()
"""


def test_a_rank_takes_over_the_node_when_the_elected_one_is_gone(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RANK_0, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as rank0:
        assert rank0.stdout is not None
        assert rank0.stdout.readline() == "True\n"
        sampler, sender, clock = make(tmp_path, rank=1, local_rank=1, world_size=2, job_key="job")
        clock.now += 11
        sampler.poll()
        assert not any(name.startswith("host/") for name in latest(sender))
        rank0.kill()
    clock.now += 11
    sampler.poll()
    assert any(name.startswith("host/") for name in latest(sender))


@pytest.mark.parametrize("error", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_where_the_file_system_has_no_locks_the_lowest_local_rank_speaks(
    error: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, operation: int) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(fcntl, "flock", refuse)
    for rank, speaks in ((0, True), (1, False)):
        sampler, sender, clock = make(tmp_path, rank=rank, local_rank=rank, world_size=2, job_key="job")
        clock.now += 11
        sampler.poll()
        assert any(name.startswith("host/") for name in latest(sender)) == speaks


@pytest.mark.fault
def test_a22_a_missing_package_means_no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from perfagent.samplers.gpu import nvml

    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(nvml, "_DRIVER_FILES", (str(tmp_path),))
    assert nvml.load() == (None, "the package nvidia-ml-py is missing")


@pytest.mark.fault
def test_a22_a_driver_that_does_not_start_means_no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from perfagent.samplers.gpu import nvml

    monkeypatch.setattr(nvml, "_DRIVER_FILES", (str(tmp_path),))
    found, reason = nvml.load()  # the real package, on a machine without the driver's library
    if found is None:
        assert reason.startswith("NVML does not start")


def test_without_a_driver_the_package_is_not_even_imported(tmp_path: Path) -> None:
    script = (
        "import sys\nfrom perfagent.samplers.gpu import nvml\nnvml._DRIVER_FILES = ()\n"
        "assert nvml.load()[0] is None\nprint('pynvml' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "False\n"


@pytest.mark.fault
def test_a14_a_forked_child_lets_go_of_the_nodes_lock(tmp_path: Path) -> None:
    sampler, _, _ = make(tmp_path, world_size=2, job_key="job")
    assert sampler._lock is not None
    sampler.poll()
    counters: list[Any] = [getattr(reader, "_counters", reader) for reader in sampler._readers or ()]
    files = [file for counter in counters for file in vars(counter).values() if isinstance(file, KernelFile)]
    assert [file for file in files if file._file is not None]
    child = os.fork()
    if child == 0:
        os._exit(0 if sampler._lock is None and all(file._file is None for file in files) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert sampler._lock is not None
