from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pynvml
import pytest
from fake_nvml import FakeGpu, FakeNvml, FakeSlice, Running

from perfagent.samplers.gpu.claims import Claims
from perfagent.samplers.gpu.sampler import GpuSampler
from perfagent.wire import CATALOGUE, metric


class Watch:
    """A sampler with a clock of our own, and what it emitted and told."""

    def __init__(
        self,
        library: FakeNvml,
        *,
        ordinal: int | None = 0,
        elected: bool = True,
        environ: Mapping[str, str] | None = None,
        folder: Path | None = None,
        key: str = "job",
        period_s: float = 1.0,
    ) -> None:
        self.now, self.step, self.ordinal, self.begun = 100.0, 1, ordinal, True
        self.rows: list[dict[str, float]] = []
        self.told: list[dict[str, Any]] = []
        self.sampler = GpuSampler(
            self.rows.append,
            self.told.append,
            ordinal=lambda: self.ordinal,
            step=lambda: self.step,
            begun=lambda: self.begun,
            elected=lambda: elected,
            period_s=lambda: period_s,
            environ=environ or {},
            claims=Claims(folder or Path(), key if folder else None),
            library=library.load,
            clock=lambda: self.now,
        )

    def poll(self, times: int = 1, every_s: float = 0.5) -> dict[str, float]:
        """The last row after so many calls."""
        for _ in range(times):
            self.sampler.poll()
            self.now += every_s
        return self.rows[-1] if self.rows else {}


def test_a_second_is_told_as_mean_minimum_and_maximum() -> None:
    gpu = FakeGpu(utilization=(10, 0), power_mw=100_000)
    watch = Watch(FakeNvml(gpu))
    assert watch.poll()["gpu/utilization_pct"] == 10.0
    gpu.utilization, gpu.power_mw, gpu.reasons = (30, 0), 300_000, 0x40
    watch.poll()
    assert len(watch.rows) == 1
    gpu.utilization, gpu.power_mw, gpu.reasons = (90, 0), 500_000, 0
    row = watch.poll()
    assert (row["gpu/utilization_pct"], row["gpu/utilization_min_pct"], row["gpu/utilization_max_pct"]) == (
        60.0,
        30.0,
        90.0,
    )
    assert (row["gpu/power_w"], row["gpu/power_min_w"], row["gpu/power_max_w"]) == (400.0, 300.0, 500.0)
    assert row["gpu/throttle_hw_thermal_pct"] == 50.0
    assert row["gpu/throttle_sw_power_cap_pct"] == 0.0


def test_counters_come_every_ten_seconds() -> None:
    watch = Watch(FakeNvml(FakeGpu(fields={4: 2})))
    watch.poll(45)
    assert sum("gpu/ecc_uncorrected_volatile" in row for row in watch.rows) == 3


def test_counters_are_not_passed_over_where_polls_and_seconds_do_not_meet() -> None:
    watch = Watch(FakeNvml(FakeGpu(fields={4: 2})))
    for number in range(240):  # one poll is late, as behind a request: ten seconds from there lie between two reports
        watch.now = 100.0 + 0.5 * number + (0.1 if number == 20 else 0.0)
        watch.sampler.poll()
    assert sum("gpu/ecc_uncorrected_volatile" in row for row in watch.rows) >= 11
    watch = Watch(FakeNvml(FakeGpu(fields={4: 2})), period_s=3.0)
    watch.poll(240)
    assert sum("gpu/ecc_uncorrected_volatile" in row for row in watch.rows) == 10  # every fourth report


def test_energy_is_told_since_the_start_and_by_step() -> None:
    gpu = FakeGpu(energy_mj=9_000_000)
    watch = Watch(FakeNvml(gpu))
    assert watch.poll()["gpu/energy_j"] == 0.0
    for _ in range(12):
        gpu.energy_mj += 350_000  # 700 W
        watch.step += 2
        watch.poll()
    told = [row["gpu/energy_per_step_j"] for row in watch.rows if "gpu/energy_per_step_j" in row]
    assert told == [175.0]
    assert watch.rows[-1]["gpu/energy_j"] == 12 * 350.0


def test_steps_longer_than_the_interval_wait_for_their_end() -> None:
    gpu = FakeGpu(energy_mj=0)
    watch = Watch(FakeNvml(gpu))
    watch.poll()
    for second in range(1, 21):
        gpu.energy_mj += 500_000
        if second == 18:
            watch.step += 1
        watch.poll(2)
    told = [row["gpu/energy_per_step_j"] for row in watch.rows if "gpu/energy_per_step_j" in row]
    assert told == [9000.0]


def test_what_came_before_the_first_step_is_the_energy_of_none() -> None:
    gpu = FakeGpu(energy_mj=0)
    watch = Watch(FakeNvml(gpu))
    watch.step, watch.begun = 0, False
    for second in range(600):  # the data are read, the model is compiled
        gpu.energy_mj += 100_000
        watch.step = 1 if second > 590 else 0
        watch.poll(2)
    watch.begun = True
    for _ in range(21):
        gpu.energy_mj += 500_000
        watch.step += 2
        watch.poll(2)
    told = [row["gpu/energy_per_step_j"] for row in watch.rows if "gpu/energy_per_step_j" in row]
    assert told == [250.0] * 4
    assert watch.rows[-1]["gpu/energy_j"] == 600 * 100.0 + 21 * 500.0 - 100.0, "since the run began it is all of it"


def test_own_and_others_of_the_node_are_told_apart() -> None:
    boards = [FakeGpu(uuid=f"GPU-{n}", utilization=(10 * n, 0)) for n in range(4)]
    first = Watch(FakeNvml(*boards), ordinal=0, environ={"LOCAL_WORLD_SIZE": "2"}).poll()
    second = Watch(FakeNvml(*boards), ordinal=1, elected=False, environ={"LOCAL_WORLD_SIZE": "2"}).poll()
    prefixes = lambda row: {name.partition("/")[0] for name in row}  # noqa: E731
    assert prefixes(first) == {"gpu", "node_gpu2", "node_gpu3"}
    assert prefixes(second) == {"gpu"}
    assert second["gpu/utilization_pct"] == 10.0
    assert "node_gpu2/utilization_min_pct" not in first
    assert first["node_gpu3/utilization_pct"] == 30.0


def test_ranks_that_see_only_their_own_gpu_are_not_told_twice(tmp_path: Path) -> None:
    boards = [FakeGpu(uuid=f"GPU-{n}") for n in range(3)]
    second = Watch(FakeNvml(*boards), elected=False, environ={"CUDA_VISIBLE_DEVICES": "1"}, folder=tmp_path)
    other_job = Watch(FakeNvml(*boards), environ={"CUDA_VISIBLE_DEVICES": "2"}, folder=tmp_path, key="another")
    for watch in (second, other_job):
        watch.poll()
    first = Watch(FakeNvml(*boards), environ={"CUDA_VISIBLE_DEVICES": "0"}, folder=tmp_path)
    assert {name.partition("/")[0] for name in first.poll()} == {"gpu", "node_gpu2"}


def test_a_process_without_cuda_speaks_for_the_node_only() -> None:
    row = Watch(FakeNvml(FakeGpu()), ordinal=None).poll()
    assert {name.partition("/")[0] for name in row} == {"node_gpu0"}


def test_a_rank_on_a_slice_tells_the_slice_and_the_board_is_not_told_again() -> None:
    board = FakeGpu(uuid="GPU-b", slices=[FakeSlice("MIG-1", 1, memory=(7, 18))])
    row = Watch(FakeNvml(board), environ={"CUDA_VISIBLE_DEVICES": "MIG-1"}).poll()
    assert row["gpu/memory_used_bytes"] == 7.0
    assert not {"gpu/power_w", "gpu/energy_j", "node_gpu0/power_w"} & row.keys()


def test_an_xid_is_a_value_of_its_moment_and_an_event() -> None:
    gpu = FakeGpu()
    library = FakeNvml(gpu)
    watch = Watch(library)
    watch.poll()
    library.events.append((gpu, 94))
    assert watch.poll()["gpu/xid"] == 94.0
    (told,) = [event for event in watch.told if event["what"] == "xid"]
    assert told == {"what": "xid", "code": 94, "meaning": "contained ECC error", "index": 0, "uuid": gpu.uuid}
    watch.poll()
    assert "gpu/xid" not in watch.rows[-1]


def test_the_devices_are_described_once() -> None:
    watch = Watch(FakeNvml(FakeGpu(uuid="GPU-a"), FakeGpu(uuid="GPU-b")))
    watch.poll(3)
    (told,) = watch.told
    assert (told["what"], told["driver"]) == ("found", "580.65.06")
    assert [gpu["uuid"] for gpu in told["gpus"]] == ["GPU-a", "GPU-b"]
    assert told["gpus"][0]["pcie_link_width_most"] == 16


@pytest.mark.fault
def test_a22_a_lost_gpu_is_left_out_told_once_and_the_others_go_on() -> None:
    lost, other = FakeGpu(uuid="GPU-a"), FakeGpu(uuid="GPU-b", utilization=(20, 0))
    watch = Watch(FakeNvml(lost, other))
    watch.poll()
    lost.lost = True
    for _ in range(6):
        row = watch.poll()
    assert {name.partition("/")[0] for name in row} == {"node_gpu1"}
    assert [event["uuid"] for event in watch.told if event["what"] == "lost"] == ["GPU-a"]


@pytest.mark.fault
def test_a22_a_gpu_that_was_lost_before_we_came_hides_no_other() -> None:
    watch = Watch(FakeNvml(FakeGpu(lost=True), FakeGpu(uuid="GPU-b")), ordinal=None)
    row = watch.poll()
    assert {name.partition("/")[0] for name in row} == {"node_gpu1"}
    assert watch.told[0] == {"what": "lost", "index": 0, "reason": "GPU is lost"}
    assert [gpu["index"] for gpu in watch.told[1]["gpus"]] == [1]


@pytest.mark.fault
def test_a22_the_xid_of_a_gpu_that_fell_off_the_bus_is_told_though_it_answers_no_more() -> None:
    lost = FakeGpu(uuid="GPU-a")
    library = FakeNvml(lost, FakeGpu(uuid="GPU-b"))
    watch = Watch(library)
    watch.poll(2)
    lost.lost = True
    watch.poll()
    library.events.append((lost, 79))
    assert watch.poll()["gpu/xid"] == 79.0
    assert [(told["what"], told["index"], told["uuid"]) for told in watch.told[1:]] == [
        ("lost", 0, "GPU-a"),
        ("xid", 0, "GPU-a"),
    ]
    assert watch.told[-1]["meaning"] == "GPU has fallen off the bus"


@pytest.mark.fault
def test_a22_memory_of_a_lost_gpu_is_not_told_from_memory() -> None:
    gpu = FakeGpu(memory=(3, 10), reserved=2)
    watch = Watch(FakeNvml(gpu))
    watch.poll()
    assert watch.sampler.free_bytes == 5.0
    gpu.lost = True
    watch.poll()
    assert watch.sampler.free_bytes is None


@pytest.mark.fault
def test_a22_a_script_that_shuts_nvml_down_once_too_often_leaves_a_gap_of_seconds() -> None:
    gpu = FakeGpu(energy_mj=5_000)
    library = FakeNvml(gpu)
    watch = Watch(library)
    watch.poll(4)
    before = len(watch.rows)
    library.down = True
    watch.poll(2)
    assert len(watch.rows) == before
    gpu.energy_mj += 7_000
    watch.poll(24)
    assert watch.rows[-1]["gpu/energy_j"] == 7.0
    assert len(watch.rows) > before
    library.events.append((gpu, 31))
    assert watch.poll()["gpu/xid"] == 31.0
    assert [told["what"] for told in watch.told] == ["found", "xid"]


@pytest.mark.fault
def test_a22_a_container_that_was_not_given_all_boards_names_no_loss() -> None:
    class Partly(FakeNvml):
        def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:  # noqa: N802
            if index == 0:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_NO_PERMISSION)
            return super().nvmlDeviceGetHandleByIndex(index)

    watch = Watch(Partly(FakeGpu(uuid="GPU-a"), FakeGpu(uuid="GPU-b")), ordinal=None)
    assert {name.partition("/")[0] for name in watch.poll()} == {"node_gpu1"}
    assert [told["what"] for told in watch.told] == ["found"]


@pytest.mark.fault
@pytest.mark.parametrize("reason", ["no NVIDIA driver on this machine", "GPU figures of AMD devices are not available"])
def test_a22_without_nvml_the_reason_is_told_and_no_value(reason: str) -> None:
    class Without(FakeNvml):
        def load(self) -> tuple[Any, str]:
            return None, reason

    watch = Watch(Without())
    watch.poll(5)
    assert watch.told == [{"what": "unavailable", "reason": reason}]
    assert watch.rows == []


class Flaky(FakeNvml):
    """From call number `first` on, `times` calls of NVML fail with that code."""

    first, times, code = 0, 0, 0

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if not name.startswith("nvml") or not callable(found) or isinstance(found, type):
            return found

        def call(*arguments: Any) -> Any:
            self.first -= 1
            if -self.times <= self.first < 0:
                raise pynvml.NVMLError(self.code)
            return found(*arguments)

        return call


@pytest.mark.parametrize("code", [1, 2, 3, 4, 6, 9, 15, 16, 18, 28, 999])
def test_a22_whatever_call_fails_no_error_comes_out_and_what_answers_goes_on(code: int) -> None:
    """At the start as in the midst: once the question for the driver's version ended the sampling for the whole run."""
    for first in range(0, 80, 2):
        library = Flaky(FakeGpu(gpm={2: 50.0}, processes=[Running(1, 5, 3)]), FakeGpu("GPU-2", pci="00000000:3C:00.0"))
        library.first, library.times, library.code = first, 2, code
        watch = Watch(library)
        watch.poll(60)
        assert watch.rows or {told["what"] for told in watch.told} & {"unavailable", "lost"}, (first, watch.told)


def test_every_name_is_in_the_catalogue() -> None:
    gpm = dict.fromkeys((2, 3, 5, 10, 20, 21, 60, 61), 1.0)
    fields = dict.fromkeys([*range(160)], 1)
    names: set[str] = set()
    for one in (FakeGpu(gpm=gpm, fields=fields), FakeGpu(fields=fields)):
        import os

        one.processes = [Running(os.getpid(), 10, 10)]
        library = FakeNvml(one, FakeGpu(uuid="GPU-x"))
        watch = Watch(library)
        library.events.append((one, 13))
        for _ in range(30):
            one.energy_mj += 1000
            watch.step += 1
            watch.poll()
        names |= {name for row in watch.rows for name in row}
    assert {name for name in names if name not in CATALOGUE and not name.startswith("node_gpu")} == set()
    assert metric("node_gpu1/power_w").unit == "W"
    told = {name for name in CATALOGUE if name.startswith("gpu/")}
    assert told - names == set(), "the catalogue names what nothing tells"
