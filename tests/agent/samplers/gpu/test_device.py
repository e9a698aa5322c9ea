# ruff: noqa: N802, N803 - the library's own names
"""Readings of one device, from a library that answers as NVML does."""

from __future__ import annotations

import inspect
from typing import Any

import pynvml
import pytest
from fake_nvml import FakeGpu, FakeNvml, FakeSlice, Running, functions

from perfagent.samplers.gpu.device import FIELDS, THROTTLE_REASONS, Gpu, slices
from perfagent.samplers.gpu.nvml import Door
from perfagent.samplers.gpu.processes import Processes

GPM = {2: 91.0, 3: 40.0, 5: 33.5, 10: 62.0, 20: 3.0, 21: 5.0, 60: 7.0, 61: 11.0}


def the(gpu: FakeGpu) -> tuple[Gpu, FakeNvml]:
    library = FakeNvml(gpu)
    return Gpu(library, 0, gpu), library


class Failing(FakeNvml):
    """Functions that fail: name -> error code, and for how many calls."""

    def __init__(self, gpu: FakeGpu, **errors: tuple[int, int]) -> None:
        super().__init__(gpu)
        self.errors = errors

    def _of(self, name: str, handle: Any) -> Any:
        code, times = self.errors.get(name, (0, 0))
        if times:
            self.errors[name] = code, times - 1
            raise pynvml.NVMLError(code)
        return super()._of(name, handle)


def test_the_fake_library_has_the_signatures_of_the_real_one() -> None:
    for name, fake in functions().items():
        real = inspect.unwrap(getattr(pynvml, name))
        assert list(inspect.signature(fake).parameters)[1:] == list(inspect.signature(real).parameters), name


def test_bits_are_the_librarys() -> None:
    reasons = {
        "sw_power_cap": "SwPowerCap", "hw_slowdown": "HwSlowdown", "sync_boost": "SyncBoost",
        "power_brake": "HwPowerBrakeSlowdown", "sw_thermal": "SwThermalSlowdown", "hw_thermal": "HwThermalSlowdown",
    }  # fmt: skip
    assert {name: getattr(pynvml, f"nvmlClocksEventReason{bit}") for name, bit in reasons.items()} == THROTTLE_REASONS


def test_readings_are_in_our_units() -> None:
    gpu, _ = the(FakeGpu(utilization=(87, 40), memory=(3 << 30, 80 << 30), power_mw=512_250))
    assert gpu.readings() == {
        "utilization_pct": 87.0, "memory_busy_pct": 40.0, "memory_used_bytes": float(3 << 30),
        "memory_total_bytes": float(80 << 30), "power_w": 512.25, "sm_clock_mhz": 1980.0,
        **{f"throttle_{name}_pct": 0.0 for name in THROTTLE_REASONS},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("version_2", "used"), [("answers", 8 << 30), ("refused", (8 << 30) + (600 << 20)), ("fails", 9 << 30)]
)
def test_memory_is_what_processes_hold_and_free_is_free(version_2: str, used: int) -> None:
    """As nvidia-smi tells it. Without the second version of the question the driver's own reserve counts as used."""
    reserved = (1 << 30) if version_2 == "fails" else (600 << 20)
    fake = FakeGpu(memory=(8 << 30, 140 << 30), reserved=reserved)
    if version_2 == "refused":
        fake.unsupported.add("nvmlDeviceGetMemoryInfo_v2")
    failing = {"nvmlDeviceGetMemoryInfo_v2": (pynvml.NVML_ERROR_UNKNOWN, 99)} if version_2 == "fails" else {}
    library = Failing(fake, **failing)  # as under WSL
    gpu = Gpu(library, 0, fake)
    for _ in range(3):
        assert gpu.readings()["memory_used_bytes"] == float(used)
    assert gpu.free_bytes == float((132 << 30) - reserved)


def test_counters_come_in_one_call_and_missing_ones_once() -> None:
    asked: list[int] = []

    class Noting(FakeNvml):
        def nvmlDeviceGetFieldValues(self, handle: FakeGpu, fieldIds: list[Any]) -> Any:
            asked.append(len(fieldIds))
            return super().nvmlDeviceGetFieldValues(handle, fieldIds)

    fake = FakeGpu(fields={3: 5, 4: 1, 94: 17, 52: 2, 82: 0})
    gpu = Gpu(Noting(fake), 0, fake)
    counters = {"ecc_corrected_volatile": 5.0, "ecc_uncorrected_volatile": 1.0}
    counters |= {"pcie_replays": 17.0, "nvlink_replay_errors": 2.0}
    for _ in range(2):
        told = gpu.rare()
        assert {name: value for name, value in told.items() if name in FIELDS} == counters
    assert (told["fan_pct"], told["power_limit_w"], told["memory_clock_mhz"]) == (30.0, 700.0, 3201.0)
    assert asked == [len(FIELDS), len(counters) + 1], "a memory temperature of 0 says nothing, and is asked for again"


def test_what_a_device_does_not_support_is_asked_once_and_absent() -> None:
    fake = FakeGpu(unsupported={"nvmlDeviceGetPowerUsage", "nvmlDeviceGetFanSpeed", "nvmlDeviceGetFieldValues"})
    gpu, library = the(fake)
    for _ in range(3):
        assert "power_w" not in gpu.readings()
        assert "fan_pct" not in gpu.rare()
    assert library.calls["nvmlDeviceGetPowerUsage"] == library.calls["nvmlDeviceGetFieldValues"] == 1
    assert Door(library).ask("nvmlDeviceGetSomethingOfTheFuture", None) is None


# ---- GPM


def test_gpm_tells_means_since_the_last_call_in_our_units() -> None:
    gpu, library = the(FakeGpu(gpm=dict(GPM)))
    assert "sm_active_pct" not in gpu.second(1.0), "one sample is no interval"
    told = gpu.second(2.0)
    expected = {
        "sm_active_pct": 91.0, "tensor_active_pct": 33.5, "dram_active_pct": 62.0, "pcie_sent_bytes_per_s": 3.0 * 2**20,
        "nvlink_sent_bytes_per_s": 11.0 * 2**20, "nvlink_received_bytes_per_s": 7.0 * 2**20,
    }  # fmt: skip
    assert {name: told[name] for name in expected} == expected
    assert gpu.describe()["gpm"] is True
    assert "pcie_sent_bytes_per_s" not in gpu.rare()
    assert library.calls["nvmlDeviceGetPcieThroughput"] == 0


def test_without_gpm_traffic_comes_from_counters() -> None:
    fake = FakeGpu(fields={138: 1000, 139: 5000})
    gpu, _ = the(fake)
    assert gpu.second(10.0) == {"temperature_c": 55.0}
    fake.fields.update({138: 3000, 139: 5000})
    told = gpu.second(12.0)
    assert (told["nvlink_sent_bytes_per_s"], told["nvlink_received_bytes_per_s"]) == (2000 * 1024 / 2.0, 0.0)
    fake.fields.update({138: 0, 139: 6000})  # a reset
    assert "nvlink_sent_bytes_per_s" not in gpu.second(14.0)
    rare = gpu.rare()
    assert (rare["pcie_sent_bytes_per_s"], rare["pcie_received_bytes_per_s"]) == (1000 * 1024, 2000 * 1024)
    assert gpu.describe()["gpm"] is False


# ---- MIG


def test_a_slice_leaves_out_what_belongs_to_the_board() -> None:
    part = FakeSlice("MIG-aaaa", instance=2, memory=(5, 18), gpm={2: 12.0})
    board = FakeGpu(slices=[part])
    library = FakeNvml(board)
    (found,) = slices(library, Gpu(library, 0, board))
    assert (found.uuid, found.board, found.describe()["mig"]) == ("MIG-aaaa", board.uuid, True)
    told = found.readings()
    assert (told["memory_used_bytes"], told["memory_total_bytes"]) == (5.0, 18.0)
    assert not {"power_w", "utilization_pct"} & told.keys()
    assert found.energy_j() is None
    assert not {"power_limit_w", "pcie_sent_bytes_per_s"} & found.rare().keys()
    found.second(1.0)
    assert found.second(2.0)["sm_active_pct"] == 12.0
    assert library.calls["nvmlGpmSampleGet"] == 0


# ---- processes


def processes(fake: FakeGpu) -> Processes:
    """Of a board, for a run whose process is number 11."""
    return Processes(Door(FakeNvml(fake)), fake, pids=frozenset({11}))


def test_own_and_foreign_processes_are_told_apart() -> None:
    fake = FakeGpu(processes=[Running(11, 1000, 70), Running(12, 300, 20), Running(13, 200, 5)])
    ours = processes(fake)
    assert ours.read(100.0) == {
        "process_memory_bytes": 1000.0, "other_memory_bytes": 500.0, "other_processes": 2.0, "process_utilization_pct": 70.0,
    }  # fmt: skip
    assert ours.read(101.0) == {}
    assert set(ours.read(106.0)) == {"process_utilization_pct"}, "the list of processes is asked for more rarely"
