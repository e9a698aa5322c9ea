from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from perfagent.config import AgentConfig
from perfagent.delivery.sender import Sender
from perfagent.delivery.transport import RecordingTransport
from perfagent.identity import Identity
from perfagent.samplers import nvml
from perfagent.samplers.nvml import Device, FakeDevice, visible
from perfagent.samplers.sampler import Sampler


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make(
    folder: Path, found: Sequence[Device] = (), *, environ: dict[str, str] | None = None, **who: Any
) -> tuple[Sampler, Sender, Clock]:
    clock = Clock()
    identity = Identity(project="p", run="r", attempt=1, **who)
    sender = Sender(AgentConfig(state_dir=folder), identity, transport=RecordingTransport())
    sampler = Sampler(sender, step=lambda: 7, device=lambda: 0, find_devices=lambda: found, environ=environ or {}, clock=clock)
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
    assert {"process/cpu_pct", "host/load1"} <= set(latest(sender))


def test_rows_of_one_shape_share_one_tuple_of_names(tmp_path: Path) -> None:
    sampler, sender, clock = make(tmp_path)
    for _ in range(8):
        sampler.poll()
        clock.now += 1.0
    rows: list[Any] = list(sender.rows)
    shapes = [row[3] for row in rows]  # the kernel's clock ticks every 10 ms: between two ticks there is no host/cpu_pct
    assert len(set(shapes)) < len(shapes)
    assert all(one is other for one in shapes for other in shapes if one == other)


def test_utilization_is_the_mean_of_what_was_read_within_the_second(tmp_path: Path) -> None:
    device = FakeDevice(0, utilization=[10.0, 30.0, 90.0, 50.0], power_w=300.0, memory_used_bytes=5.0)
    sampler, sender, clock = make(tmp_path, [device])
    sampler.poll_gpu()
    sampler.poll()
    assert latest(sender)["gpu/utilization_pct"] == 10.0
    clock.now += 0.5
    sampler.poll_gpu()
    clock.now += 0.5
    sampler.poll_gpu()
    sampler.poll()
    assert latest(sender)["gpu/utilization_pct"] == 60.0
    assert latest(sender)["gpu/power_w"] == 300.0


def test_without_a_gpu_there_are_no_gpu_series(tmp_path: Path) -> None:
    sampler, sender, _ = make(tmp_path)
    sampler.poll_gpu()
    sampler.poll()
    assert not any("gpu" in name for name in latest(sender))


def test_what_a_device_does_not_tell_is_absent(tmp_path: Path) -> None:
    sampler, sender, _ = make(tmp_path, [FakeDevice(0, utilization=[None], temperature_c=60.0)])
    sampler.poll_gpu()
    sampler.poll()
    assert {name for name in latest(sender) if "gpu" in name} == {"gpu/temperature_c"}


@pytest.mark.fault
def test_a22_a_lost_gpu_is_left_out_and_the_other_goes_on(tmp_path: Path) -> None:
    lost, other = FakeDevice(0, utilization=[50.0, RuntimeError("GPU is lost")]), FakeDevice(1, utilization=[20.0])
    sampler, sender, clock = make(tmp_path, [lost, other])
    sampler.poll_gpu()
    clock.now += 1.0
    sampler.poll_gpu()
    sampler.poll()
    assert {name for name in latest(sender) if "gpu" in name} == {"node_gpu1/utilization_pct"}
    clock.now += 1.0
    sampler.poll_gpu()
    assert sampler._lost == {0}


def test_other_gpus_of_the_node_are_sent_by_the_elected_rank_only(tmp_path: Path) -> None:
    found = [FakeDevice(n, utilization=[float(n)]) for n in range(4)]
    environ = {"LOCAL_WORLD_SIZE": "2"}
    first, first_sender, _ = make(tmp_path, found, environ=environ, rank=0, local_rank=0, world_size=2, job_key="job")
    second, second_sender, _ = make(tmp_path, found, environ=environ, rank=1, local_rank=1, world_size=2, job_key="job")
    second._device = lambda: 1
    for sampler in (first, second):
        sampler.poll_gpu()
        sampler.poll()
    assert {name for name in latest(first_sender) if "gpu" in name} == {
        "gpu/utilization_pct",
        "node_gpu2/utilization_pct",
        "node_gpu3/utilization_pct",
    }
    assert latest(second_sender)["gpu/utilization_pct"] == 1.0
    assert not any(name.startswith(("host/", "node_gpu")) for name in latest(second_sender))
    assert any(name.startswith("host/") for name in latest(first_sender))


RANK_0 = """
import sys
from pathlib import Path
from perfagent.config import AgentConfig
from perfagent.delivery.sender import Sender
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


def test_cuda_visible_devices_decides_which_is_the_ranks_own() -> None:
    found = [FakeDevice(n) for n in range(4)]
    assert visible(found, {}) == found
    assert visible(found, {"CUDA_VISIBLE_DEVICES": "2,0"}) == [found[2], found[0]]
    assert visible(found, {"CUDA_VISIBLE_DEVICES": "GPU-00000003"}) == [found[3]]
    assert visible(found, {"CUDA_VISIBLE_DEVICES": "1,-1,2"}) == [found[1]]
    assert visible(found, {"CUDA_VISIBLE_DEVICES": ""}) == []


@pytest.mark.fault
def test_a22_an_nvml_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    monkeypatch.setattr(nvml, "_probe", lambda: release.wait(30) and [])
    assert nvml.devices(timeout_s=0.1) == []
    release.set()


@pytest.mark.fault
def test_a22_a_missing_library_means_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert nvml.devices() == []


class OldNvml:
    """Just enough of the library: one function fails as unsupported, one works."""

    class NVMLError_NotSupported(Exception):  # noqa: N801, N818 - the library's name
        pass

    class NVMLError_Unknown(Exception):  # noqa: N801, N818
        pass

    NVML_TEMPERATURE_GPU = NVML_CLOCK_SM = 0
    asked = 0

    def nvmlDeviceGetUUID(self, _: Any) -> bytes:  # noqa: N802
        return b"GPU-1"

    def nvmlDeviceGetPowerUsage(self, _: Any) -> int:  # noqa: N802
        self.asked += 1
        raise self.NVMLError_NotSupported

    def nvmlDeviceGetMemoryInfo(self, _: Any) -> Any:  # noqa: N802
        raise self.NVMLError_Unknown

    def nvmlDeviceGetTemperature(self, *_: Any) -> int:  # noqa: N802
        return 61

    def nvmlDeviceGetClockInfo(self, *_: Any) -> int:  # noqa: N802
        raise self.NVMLError_NotSupported

    nvmlDeviceGetUtilizationRates = nvmlDeviceGetPowerUsage  # noqa: N815


def test_what_nvml_does_not_support_is_asked_once() -> None:
    library = OldNvml()
    device = nvml.NvmlDevice(library, 0, object())
    assert device.uuid == "GPU-1"
    assert device.read() == device.read() == {"temperature_c": 61.0}
    assert library.asked == 1


@pytest.mark.fault
def test_a14_a_forked_child_lets_go_of_the_nodes_lock(tmp_path: Path) -> None:
    sampler, _, _ = make(tmp_path, world_size=2, job_key="job")
    assert sampler._lock_fd >= 0
    child = os.fork()
    if child == 0:
        os._exit(0 if sampler._lock_fd == -1 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert sampler._lock_fd >= 0
