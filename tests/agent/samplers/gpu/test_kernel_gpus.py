"""Readings of AMD and Intel GPUs, from trees of files as their drivers make them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from gpu_watch import Watch, prefixes
from kernel_trees import Machine, write

from perfagent.samplers.gpu import kernel_gpu
from perfagent.samplers.gpu.kernel_gpu import KernelGpu
from perfagent.wire import CATALOGUE


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


class Clock:
    now = 10.0

    def __call__(self) -> float:
        return self.now


def the(machine: Machine, folder: Path, clock: Callable[[], float] | None = None) -> KernelGpu:
    return KernelGpu(0, folder, "card0", process=machine.process, clock=clock or Clock())


# ---- AMD


def test_mi300x_tells_what_its_files_hold(machine: Machine) -> None:
    gpu = the(machine, machine.mi300x())
    assert gpu.readings() == {
        "utilization_pct": 87.0, "memory_busy_pct": 35.0, "memory_used_bytes": 150323855360.0,
        "memory_total_bytes": 206141652992.0, "power_w": pytest.approx(652.0), "sm_clock_mhz": pytest.approx(2104.0),
    }  # fmt: skip
    assert gpu.free_bytes == 206141652992 - 150323855360
    assert gpu.second(0.0) == {"temperature_c": 71.0, "memory_temperature_c": 58.0}
    assert gpu.rare() == {
        "power_limit_w": pytest.approx(750.0), "memory_clock_mhz": pytest.approx(1300.0), "pcie_replays": 2.0,
        "ecc_uncorrected_volatile": 1.0, "ecc_corrected_volatile": 42.0, "retired_pages_double": 1.0,
    }  # fmt: skip
    assert gpu.describe() == {
        "index": 0, "uuid": "a1b2c3d4e5f60718", "name": "AMD Instinct MI300X OAM", "pci": "0000:0c:00.0",
        "memory_total_bytes": 206141652992.0, "power_limit_w": pytest.approx(750.0),
    }  # fmt: skip


def test_zero_is_told_only_of_what_can_be_zero(machine: Machine) -> None:
    gpu = the(machine, machine.radeon())
    readings = gpu.readings()
    assert readings["memory_used_bytes"] == 0.0
    assert "sm_clock_mhz" not in readings
    assert readings["power_w"] == pytest.approx(45.0)
    assert gpu.second(0.0) == {"temperature_c": 52.0, "memory_temperature_c": 70.0}, "the edge's, not the hot spot's"
    errors = {"ecc_uncorrected_volatile": 4.0, "ecc_corrected_volatile": 0.0}
    assert gpu.rare() == {"fan_pct": pytest.approx(20.0), **errors}
    assert gpu.describe()["name"] == "AMD GPU 1002:744C"


def test_energy_of_amd_is_the_sum_of_its_power(machine: Machine) -> None:
    clock = Clock()
    gpu = the(machine, machine.mi300x(), clock)
    gpu.readings()
    for _ in range(4):
        clock.now += 0.5
        gpu.readings()
    assert gpu.energy_j() == pytest.approx(2 * 652.0)


# ---- Intel


def test_arc_with_i915(machine: Machine) -> None:
    folder, clock = machine.arc(), Clock()
    gpu = the(machine, folder, clock)
    gpu.readings()
    clock.now += 2.0
    write(folder, {"hwmon/hwmon3/energy1_input": "1300000000\n"})
    assert gpu.readings() == {"sm_clock_mhz": 2400.0, "power_w": pytest.approx(150.0)}
    assert gpu.energy_j() == pytest.approx(1300.0)
    clock.now += 2.0
    write(folder, {"hwmon/hwmon3/energy1_input": "5\n"})
    assert "power_w" not in gpu.readings(), "the counter begins again"
    assert gpu.second(0.0) == {"temperature_c": 61.0}
    assert gpu.rare() == {"power_limit_w": pytest.approx(190.0)}


def test_battlemage_with_xe(machine: Machine) -> None:
    folder = machine.battlemage()
    gpu = the(machine, folder)
    assert gpu.readings() == {"sm_clock_mhz": 2850.0, "memory_total_bytes": 12884901888.0}
    assert gpu.energy_j() == pytest.approx(500.0), "the card's, which contains the package's"
    assert gpu.second(0.0) == {"temperature_c": 55.0, "memory_temperature_c": 60.0}
    assert gpu.rare() == {"power_limit_w": pytest.approx(120.0)}, "that of the card is off"
    (folder / "hwmon/hwmon6/energy1_input").unlink()
    gpu.readings()
    assert gpu.energy_j() is None, "the package's does not take the card's place"
    of_package = the(machine, folder)
    of_package.readings()
    assert of_package.energy_j() == pytest.approx(400.0)


# ---- what this process uses


def test_xe_counts_cycles_and_memory_of_this_process(machine: Machine) -> None:
    folder = machine.battlemage("0000:04:00.0")
    gpu = the(machine, folder)

    def use(ccs: int, rcs: int, total: int) -> None:
        keys = {"cycles_ccs": str(ccs), "total_cycles_ccs": str(total), "engine_capacity_ccs": "2"}
        keys |= {"cycles_rcs": str(rcs), "total_cycles_rcs": str(total)}
        keys |= {"resident_vram0": "23992 KiB", "total_vram0": "1 MiB"}
        machine.opens(7, "0000:04:00.0", "xe", 3, **keys)
        machine.opens(8, "0000:04:00.0", "xe", 3, **keys)  # a duplicate of the descriptor
        machine.opens(9, "0000:b3:00.0", "xe", 4, **keys)  # another board

    use(100, 50, 1000)
    assert gpu.processes.read(100.0) == {"process_memory_bytes": 23992 * 1024.0}
    use(1700, 250, 2000)
    assert gpu.processes.read(101.0) == {}
    assert gpu.processes.read(105.0) == {
        "process_memory_bytes": 23992 * 1024.0, "process_utilization_pct": 80.0, "utilization_pct": 80.0,
    }  # fmt: skip


def test_i915_counts_nanoseconds_of_several_clients(machine: Machine) -> None:
    """One that falls behind is not counted twice."""
    gpu = the(machine, machine.arc("0000:03:00.0"))
    busy = []
    for now, first, second in ((100.0, 0, 5), (110.0, 25, 30), (115.0, 10, 30), (120.0, 35, 40)):
        machine.opens(5, "0000:03:00.0", "i915", 1, engine_compute=f"{first * 10**8} ns", total_local0="3 MiB")
        machine.opens(6, "0000:03:00.0", "i915", 2, engine_compute=f"{second * 10**8} ns", total_local0="5")
        values = gpu.processes.read(now)
        assert values.pop("process_memory_bytes") == 3 * 2**20 + 5.0
        assert values.get("utilization_pct") == values.get("process_utilization_pct")
        busy.append(values.get("utilization_pct"))
    assert busy == [None, pytest.approx(50.0), 0.0, pytest.approx(40.0)]


def test_amd_tells_the_memory_and_no_idle_engine_for_rocm(machine: Machine) -> None:
    gpu = the(machine, machine.mi300x("0000:0c:00.0"))
    for now in (100.0, 105.0):
        machine.opens(5, "0000:0c:00.0", "amdgpu", 1, memory_vram="65536 KiB", memory_gtt="2048 KiB", engine_dec="5 ns")
        assert gpu.processes.read(now) == {"process_memory_bytes": 65536 * 1024.0}


# ---- boards, and files that fail


def test_display_adapters_and_connectors_are_no_boards(machine: Machine) -> None:
    for number, driver in enumerate(("ast", "mgag200", "virtio-pci", "nvidia")):
        machine.card(f"0000:02:0{number}.0", driver, "1A03:2000", {"gpu_busy_percent": "3\n"})
    machine.mi300x("0000:0c:00.0")
    machine.battlemage("0000:b4:00.0")
    boards = kernel_gpu.boards(machine.sys)
    found = [(gpu.driver, gpu.index, gpu.pci) for gpu in boards]
    assert found == [("amdgpu", 0, "0000:0c:00.0"), ("xe", 1, "0000:b4:00.0")]
    assert kernel_gpu.boards(machine.sys / "nothing") == []


def test_file_that_fails_leaves_the_others(machine: Machine) -> None:
    folder = machine.mi300x()
    for name in ("gpu_busy_percent", "hwmon/hwmon4/power1_input", "ras/umc_err_count"):
        (folder / name).unlink()
        (folder / name).mkdir()  # reading it fails with an OSError, as in a reset
    write(folder, {"hwmon/hwmon4/freq1_input": "garbage\n", "hwmon/hwmon4/temp2_input": ""})
    gpu = the(machine, folder)
    assert {"utilization_pct", "power_w", "sm_clock_mhz"}.isdisjoint(gpu.readings())
    assert gpu.second(0.0) == {"memory_temperature_c": 58.0}
    assert gpu.rare()["ecc_corrected_volatile"] == 2.0
    write(folder, {"ras/gfx_err_count": ""})
    assert gpu.rare()["ecc_corrected_volatile"] == 2.0, "a sum does not fall"
    (folder / "gpu_busy_percent").rmdir()
    write(folder, {"gpu_busy_percent": "12\n"})
    assert gpu.readings()["utilization_pct"] == 12.0, "the reset is over"


def test_sleeping_board_is_left_asleep(machine: Machine) -> None:
    folder = machine.mi300x()
    write(folder, {"power/runtime_status": "suspended\n"})
    gpu = the(machine, folder)
    assert (gpu.readings(), gpu.second(0.0)) == ({}, {})
    assert {name for name in gpu.rare() if not name.startswith("ecc_")} == set(), "errors counted so far stay"
    write(folder, {"power/runtime_status": "active\n"})
    assert gpu.readings()["utilization_pct"] == 87.0


# ---- in the sampler


def watching(machine: Machine, ordinal: int | None = None) -> Watch:
    return Watch(None, kernel_gpus=lambda: kernel_gpu.boards(machine.sys, clock=Clock()), ordinal=ordinal)


@pytest.mark.fault
def test_a22_removed_card_is_told_once_the_other_goes_on(machine: Machine) -> None:
    folders = machine.mi300x("0000:0c:00.0"), machine.mi300x("0000:0d:00.0", unique_id="00ff")
    machine.arc("0000:0e:00.0")
    machine.battlemage("0000:0f:00.0")
    watch = watching(machine)
    row = watch.poll(130)
    assert prefixes(row) == {f"node_gpu{number}" for number in range(4)}
    names = {"gpu/" + name.partition("/")[2] for row in watch.rows for name in row}
    assert len(names) >= 15 and names <= CATALOGUE.keys()
    shutil.rmtree(folders[0])
    assert prefixes(watch.poll(6)) == {f"node_gpu{number}" for number in (1, 2, 3)}
    assert watch.kinds() == [("found", None), ("lost", "a1b2c3d4e5f60718")]
    assert watch.told[0]["driver"].startswith("amdgpu, i915, xe of Linux")


def test_machine_without_any_gpu_says_so_and_is_not_asked_again(machine: Machine) -> None:
    watch = watching(machine, 0)
    assert watch.sampler.poll() is False
    assert watch.kinds() == [("unavailable", None)]


def test_integrated_graphics_are_told_where_a_rank_uses_them(machine: Machine) -> None:
    machine.arc("0000:00:02.0")
    idle = watching(machine)
    assert idle.poll(150) == {}
    own = watching(machine, 0)
    assert prefixes(own.poll()) == {"gpu"}
