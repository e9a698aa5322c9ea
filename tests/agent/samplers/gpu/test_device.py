# ruff: noqa: N802, N803 - the library's own names
from __future__ import annotations

import inspect
from typing import Any

import pynvml
import pytest
from fake_nvml import FakeGpu, FakeNvml, FakeSlice, Running, functions

from perfagent.samplers.gpu.device import FIELDS, LINK_FIELDS, THROTTLE_REASONS, Gpu, slices
from perfagent.samplers.gpu.nvml import DeviceLost, Door
from perfagent.samplers.gpu.processes import Processes

GPM = {2: 91.0, 3: 40.0, 5: 33.5, 10: 62.0, 20: 3.0, 21: 5.0, 60: 7.0, 61: 11.0}


def the(gpu: FakeGpu) -> tuple[Gpu, FakeNvml]:
    library = FakeNvml(gpu)
    return Gpu(library, 0, gpu), library


@pytest.mark.parametrize("name", sorted(functions()))
def test_the_fake_library_has_the_signatures_of_the_real_one(name: str) -> None:
    real = inspect.unwrap(getattr(pynvml, name))
    fake = list(inspect.signature(functions()[name]).parameters)[1:]  # without self
    assert fake == list(inspect.signature(real).parameters)


def test_bits_and_field_numbers_are_the_librarys() -> None:
    reasons = {
        "sw_power_cap": pynvml.nvmlClocksEventReasonSwPowerCap,
        "hw_slowdown": pynvml.nvmlClocksEventReasonHwSlowdown,
        "sync_boost": pynvml.nvmlClocksEventReasonSyncBoost,
        "sw_thermal": pynvml.nvmlClocksEventReasonSwThermalSlowdown,
        "hw_thermal": pynvml.nvmlClocksEventReasonHwThermalSlowdown,
        "power_brake": pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown,
    }
    assert reasons == THROTTLE_REASONS
    fields = {
        "ecc_corrected_volatile": pynvml.NVML_FI_DEV_ECC_SBE_VOL_TOTAL,
        "ecc_uncorrected_volatile": pynvml.NVML_FI_DEV_ECC_DBE_VOL_TOTAL,
        "ecc_corrected_aggregate": pynvml.NVML_FI_DEV_ECC_SBE_AGG_TOTAL,
        "ecc_uncorrected_aggregate": pynvml.NVML_FI_DEV_ECC_DBE_AGG_TOTAL,
        "retired_pages_single": pynvml.NVML_FI_DEV_RETIRED_SBE,
        "retired_pages_double": pynvml.NVML_FI_DEV_RETIRED_DBE,
        "nvlink_crc_flit_errors": pynvml.NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL,
        "nvlink_crc_data_errors": pynvml.NVML_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL,
        "nvlink_replay_errors": pynvml.NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL,
        "nvlink_recovery_errors": pynvml.NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL,
        "memory_temperature_c": pynvml.NVML_FI_DEV_MEMORY_TEMP,
        "pcie_replays": pynvml.NVML_FI_DEV_PCIE_REPLAY_COUNTER,
        "remapped_rows_corrected": pynvml.NVML_FI_DEV_REMAPPED_COR,
        "remapped_rows_uncorrected": pynvml.NVML_FI_DEV_REMAPPED_UNC,
        "remap_pending": pynvml.NVML_FI_DEV_REMAPPED_PENDING,
        "remap_failed": pynvml.NVML_FI_DEV_REMAPPED_FAILURE,
    }
    assert {name: (number, 0) for name, number in fields.items()} == FIELDS
    assert [number for number, _ in LINK_FIELDS.values()] == [
        pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX,
        pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX,
    ]


@pytest.mark.parametrize("kind", range(pynvml.NVML_VALUE_TYPE_COUNT))
def test_a_counter_is_read_as_the_type_it_has(kind: int) -> None:
    class Typed(FakeNvml):
        def nvmlDeviceGetFieldValues(self, handle: FakeGpu, fieldIds: list[Any]) -> Any:
            values = super().nvmlDeviceGetFieldValues(handle, fieldIds)
            members = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
            for value in values:
                if value.nvmlReturn == 0:
                    value.valueType, value.value.ullVal = kind, 0
                    setattr(value.value, members[kind], 7)
            return values

    fake = FakeGpu(fields={94: 0})
    assert Gpu(Typed(fake), 0, fake).rare()["pcie_replays"] == 7.0


def test_readings_are_in_our_units() -> None:
    gpu, _ = the(FakeGpu(utilization=(87, 40), memory=(3 << 30, 80 << 30), power_mw=512_250))
    assert gpu.readings() == {
        "utilization_pct": 87.0,
        "memory_busy_pct": 40.0,
        "memory_used_bytes": float(3 << 30),
        "memory_total_bytes": float(80 << 30),
        "power_w": 512.25,
        "sm_clock_mhz": 1980.0,
        **{f"throttle_{name}_pct": 0.0 for name in THROTTLE_REASONS},
    }


def test_memory_is_what_processes_hold_as_nvidia_smi_tells_it_and_what_is_free_is_free() -> None:
    fake = FakeGpu(memory=(8 << 30, 140 << 30), reserved=600 << 20)
    gpu, library = the(fake)
    assert gpu.readings()["memory_used_bytes"] == float(8 << 30)
    assert gpu.free_bytes == float((132 << 30) - (600 << 20))
    old, library = the(
        FakeGpu(memory=(8 << 30, 140 << 30), reserved=600 << 20, unsupported={"nvmlDeviceGetMemoryInfo_v2"})
    )
    for _ in range(3):
        assert old.readings()["memory_used_bytes"] == float((8 << 30) + (600 << 20))
    assert old.free_bytes == gpu.free_bytes
    assert library.calls["nvmlDeviceGetMemoryInfo_v2"] == 1  # at the start


def test_where_the_second_version_of_memory_fails_the_first_is_asked() -> None:
    class Wsl(FakeNvml):
        def nvmlDeviceGetMemoryInfo(self, handle: Any, version: Any = None) -> Any:
            if version is not None:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN)
            return super().nvmlDeviceGetMemoryInfo(handle)

    fake = FakeGpu(memory=(3, 10), reserved=2)
    assert Gpu(Wsl(fake), 0, fake).readings()["memory_used_bytes"] == 5.0


def test_throttle_reasons_are_told_by_name_under_both_names_of_the_function() -> None:
    old = {"nvmlDeviceGetCurrentClocksEventReasons"}
    for unsupported in (set(), old):
        reasons = pynvml.nvmlClocksEventReasonHwThermalSlowdown | pynvml.nvmlClocksEventReasonGpuIdle
        gpu, _ = the(FakeGpu(reasons=reasons, unsupported=set(unsupported)))
        told = {name for name, value in gpu.readings().items() if name.startswith("throttle_") and value}
        assert told == {"throttle_hw_thermal_pct"}


def test_counters_come_in_one_call_and_what_a_device_does_not_have_is_not_asked_again() -> None:
    fake = FakeGpu(fields={3: 5, 4: 1, 94: 17, 52: 2, 82: 0})
    gpu, library = the(fake)
    told = gpu.rare()
    assert told["ecc_corrected_volatile"] == 5.0
    assert told["ecc_uncorrected_volatile"] == 1.0
    assert told["pcie_replays"] == 17.0
    assert told["nvlink_replay_errors"] == 2.0
    assert not {"ecc_corrected_aggregate", "remap_pending", "memory_temperature_c"} & told.keys()
    assert library.calls["nvmlDeviceGetFieldValues"] == 1
    assert set(gpu._fields) == {
        "ecc_corrected_volatile",
        "ecc_uncorrected_volatile",
        "pcie_replays",
        "nvlink_replay_errors",
        "memory_temperature_c",
    }
    assert (told["fan_pct"], told["power_limit_w"], told["memory_clock_mhz"]) == (30.0, 700.0, 3201.0)


def test_what_a_device_does_not_support_is_asked_once_and_absent() -> None:
    fake = FakeGpu(unsupported={"nvmlDeviceGetPowerUsage", "nvmlDeviceGetFanSpeed", "nvmlDeviceGetFieldValues"})
    gpu, library = the(fake)
    for _ in range(3):
        assert "power_w" not in gpu.readings()
        assert "fan_pct" not in gpu.rare()
    assert library.calls["nvmlDeviceGetPowerUsage"] == library.calls["nvmlDeviceGetFieldValues"] == 1


def test_a_function_that_the_library_does_not_have_is_absent() -> None:
    assert Door(FakeNvml()).ask("nvmlDeviceGetSomethingOfTheFuture", None) is None


def test_an_error_of_the_moment_is_asked_again() -> None:
    class Moody(FakeNvml):
        def nvmlDeviceGetPowerUsage(self, handle: FakeGpu) -> int:
            self.calls["moody"] += 1
            if self.calls["moody"] == 1:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN)
            return 100_000

    fake = FakeGpu()
    gpu = Gpu(Moody(fake), 0, fake)
    assert "power_w" not in gpu.readings()
    assert gpu.readings()["power_w"] == 100.0


@pytest.mark.fault
def test_a22_a_lost_device_says_so_and_nothing_else_raises() -> None:
    fake = FakeGpu()
    gpu, _ = the(fake)
    fake.lost = True
    with pytest.raises(DeviceLost, match="GPU is lost"):
        gpu.readings()


# ---- GPM


def test_gpm_tells_means_since_the_last_call_in_our_units() -> None:
    gpu, library = the(FakeGpu(gpm=dict(GPM)))
    assert not {"sm_active_pct"} & gpu.second(1.0).keys()  # one sample is no interval
    told = gpu.second(2.0)
    assert told["sm_active_pct"] == 91.0
    assert told["tensor_active_pct"] == 33.5
    assert told["dram_active_pct"] == 62.0
    assert told["pcie_sent_bytes_per_s"] == 3.0 * 2**20
    assert told["nvlink_sent_bytes_per_s"] == 11.0 * 2**20
    assert told["nvlink_received_bytes_per_s"] == 7.0 * 2**20
    assert gpu.describe()["gpm"] is True
    assert not {"pcie_sent_bytes_per_s"} & gpu.rare().keys()
    assert library.calls["nvmlDeviceGetPcieThroughput"] == 0


def test_a_metric_that_gpm_does_not_have_is_absent_and_nan_too() -> None:
    gpu, _ = the(FakeGpu(gpm={2: 50.0, 5: float("nan")}))
    gpu.second(1.0)
    assert {name for name in gpu.second(2.0) if name != "temperature_c"} == {"sm_active_pct"}


def test_without_gpm_traffic_comes_from_counters() -> None:
    fake = FakeGpu(fields={138: 1000, 139: 5000})
    gpu, _ = the(fake)
    assert gpu.second(10.0) == {"temperature_c": 55.0}
    fake.fields.update({138: 3000, 139: 5000})
    told = gpu.second(12.0)
    assert told["nvlink_sent_bytes_per_s"] == 2000 * 1024 / 2.0
    assert told["nvlink_received_bytes_per_s"] == 0.0
    fake.fields.update({138: 0, 139: 6000})  # a reset
    assert "nvlink_sent_bytes_per_s" not in gpu.second(14.0)
    rare = gpu.rare()
    assert rare["pcie_sent_bytes_per_s"] == 1000 * 1024
    assert rare["pcie_received_bytes_per_s"] == 2000 * 1024
    assert gpu.describe()["gpm"] is False


# ---- MIG


def test_a_slice_tells_its_own_memory_and_leaves_out_what_belongs_to_the_board() -> None:
    part = FakeSlice("MIG-aaaa", instance=2, memory=(5, 18), gpm={2: 12.0})
    board = FakeGpu(slices=[part])
    library = FakeNvml(board)
    (found,) = slices(library, Gpu(library, 0, board))
    assert (found.uuid, found.board) == ("MIG-aaaa", board.uuid)
    told = found.readings()
    assert (told["memory_used_bytes"], told["memory_total_bytes"]) == (5.0, 18.0)
    assert not {"power_w", "utilization_pct"} & told.keys()
    assert found.energy_j() is None
    assert not {"power_limit_w", "pcie_sent_bytes_per_s"} & found.rare().keys()
    found.second(1.0)
    assert found.second(2.0)["sm_active_pct"] == 12.0
    assert library.calls["nvmlGpmSampleGet"] == 0
    assert found.describe()["mig"] is True


def test_a_slice_that_does_not_tell_its_number_has_no_gpm_of_the_whole_board() -> None:
    class Nameless(FakeNvml):
        def nvmlDeviceGetGpuInstanceId(self, device: Any) -> int:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NO_PERMISSION)

    board = FakeGpu(slices=[FakeSlice("MIG-aaaa", instance=2)], gpm={2: 99.0})
    library = Nameless(board)
    (found,) = slices(library, Gpu(library, 0, board))
    found.second(1.0)
    assert "sm_active_pct" not in found.second(2.0)
    assert found.describe()["gpm"] is False


# ---- processes


def test_own_and_foreign_processes_are_told_apart() -> None:
    fake = FakeGpu(processes=[Running(11, 1000, 70), Running(12, 300, 20), Running(13, 200, 5)])
    library = FakeNvml(fake)
    processes = Processes(Door(library), fake, pids=frozenset({11}))
    assert processes.read(100.0) == {
        "process_memory_bytes": 1000.0,
        "other_memory_bytes": 500.0,
        "other_processes": 2.0,
        "process_utilization_pct": 70.0,
    }
    assert processes.read(101.0) == {}
    assert set(processes.read(106.0)) == {"process_utilization_pct"}
    assert library.calls["nvmlDeviceGetComputeRunningProcesses"] == 1


def test_a_process_that_waits_uses_nothing_once_it_was_seen_to_use_something() -> None:
    fake = FakeGpu(processes=[Running(12, 10, 90)])
    processes = Processes(Door(FakeNvml(fake)), fake, pids=frozenset({11}))
    told = lambda now: processes.read(now).get("process_utilization_pct")  # noqa: E731
    assert told(0.0) is None  # its id may be another one here
    fake.processes.append(Running(11, 10, 60))
    assert told(3.0) is None  # not due
    assert told(5.0) == 60.0
    fake.processes[1].sm = 4_000_000_000  # what some drivers tell now and then
    assert told(10.0) is None
    fake.processes.pop()
    assert told(15.0) == 0.0
    fake.processes.clear()
    assert told(20.0) == 0.0
    fake.unsupported.add("nvmlDeviceGetProcessUtilization")
    assert told(25.0) is None


def test_where_the_driver_tells_ids_of_another_namespace_nothing_is_claimed() -> None:
    fake = FakeGpu(processes=[Running(4711, 1000, 70)])
    assert Processes(Door(FakeNvml(fake)), fake, pids=frozenset({11})).read(1.0) == {}


def test_memory_that_the_driver_does_not_know_is_absent() -> None:
    fake = FakeGpu(processes=[Running(11, None, 70)])
    told = Processes(Door(FakeNvml(fake)), fake, pids=frozenset({11})).read(1.0)
    assert "process_memory_bytes" not in told
    assert told["other_memory_bytes"] == 0.0


def test_an_idle_gpu_has_no_processes_and_no_error() -> None:
    fake = FakeGpu()
    assert Processes(Door(FakeNvml(fake)), fake, pids=frozenset({11})).read(1.0) == {}
