"""What a rank tells of the devices of its node, second by second, and of devices that fail."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pynvml
import pytest
from fake_nvml import FakeGpu, FakeNvml, Running
from gpu_watch import Watch, prefixes

from perfagent.wire import CATALOGUE, metric


def boards(count: int) -> list[FakeGpu]:
    return [FakeGpu(uuid=f"GPU-{n}", utilization=(10 * n, 0)) for n in range(count)]


# ---- seconds, counters and energy


def test_a_second_is_told_as_mean_minimum_and_maximum() -> None:
    gpu = FakeGpu(utilization=(10, 0), power_mw=100_000)
    watch = Watch(FakeNvml(gpu))
    assert watch.poll()["gpu/utilization_pct"] == 10.0
    gpu.utilization, gpu.power_mw, gpu.reasons = (30, 0), 300_000, 0x40
    watch.poll()
    assert len(watch.rows) == 1
    gpu.utilization, gpu.power_mw, gpu.reasons = (90, 0), 500_000, 0
    expected = {
        "utilization_pct": 60.0, "utilization_min_pct": 30.0, "utilization_max_pct": 90.0, "power_w": 400.0, "power_min_w": 300.0,
        "power_max_w": 500.0, "throttle_hw_thermal_pct": 50.0, "throttle_sw_power_cap_pct": 0.0,
    }  # fmt: skip
    row = watch.poll()
    assert {name: row[f"gpu/{name}"] for name in expected} == expected


def test_energy_is_told_since_the_start_and_by_step() -> None:
    gpu = FakeGpu(energy_mj=0)
    watch = Watch(FakeNvml(gpu))
    watch.step, watch.begun = 0, False  # what came before the first step is the energy of none
    watch.train(gpu, 590, 100.0)  # the data are read, the model is compiled
    watch.step = 1
    watch.train(gpu, 10, 100.0)
    watch.begun = True
    watch.train(gpu, 21, 500.0, steps=2)
    assert watch.values("gpu/energy_per_step_j") == [250.0] * 4
    assert watch.rows[-1]["gpu/energy_j"] == 600 * 100.0 + 21 * 500.0 - 100.0, "since the run began it is all of it"


# ---- whose devices they are


NAMED = {"CUDA_VISIBLE_DEVICES": "GPU-0,GPU-1,GPU-2,GPU-3"}


def test_own_and_others_of_the_node_are_told_apart(tmp_path: Path) -> None:
    environ = NAMED | {"LOCAL_WORLD_SIZE": "2"}
    ranks = [
        Watch(FakeNvml(*boards(4)), ordinal=rank, elected=not rank, environ=environ, job=tmp_path) for rank in (0, 1)
    ]
    assert prefixes(ranks[0].poll()) == {"gpu"}, "the other rank has not named its board"
    second = ranks[1].poll()
    first = ranks[0].poll(30)
    assert prefixes(first) == {"gpu", "node_gpu2", "node_gpu3"}
    assert prefixes(second) == {"gpu"}
    assert (second["gpu/utilization_pct"], first["node_gpu3/utilization_pct"]) == (10.0, 30.0)
    assert {prefix for row in ranks[0].rows for prefix in prefixes(row)} == prefixes(first), "no half series"
    assert "node_gpu2/utilization_min_pct" not in first


def test_boards_that_no_rank_names_are_told_after_a_minute() -> None:
    watch = Watch(FakeNvml(*boards(2)), ordinal=None)
    assert watch.poll(100) == {}
    assert prefixes(watch.poll(30)) == {"node_gpu0", "node_gpu1"}


def test_an_xid_is_a_value_of_its_moment_and_an_event() -> None:
    library = FakeNvml(gpu := FakeGpu())
    watch = Watch(library)
    watch.poll()
    library.events.append((gpu, 94))
    assert watch.poll()["gpu/xid"] == 94.0
    assert watch.told[1:] == [{"what": "xid", "code": 94, "index": 0, "uuid": gpu.uuid}]
    assert "gpu/xid" not in watch.poll(2)


# ---- devices and drivers that fail


@pytest.mark.fault
def test_a22_lost_gpu_is_told_once_with_its_xid_others_go_on() -> None:
    lost, other = FakeGpu(uuid="GPU-a", memory=(3, 10), reserved=2), FakeGpu(uuid="GPU-b")
    library = FakeNvml(lost, other)
    watch = Watch(library, environ={"CUDA_VISIBLE_DEVICES": "GPU-a"})
    watch.poll(2)
    assert [gpu["uuid"] for gpu in watch.told[0]["gpus"]] == ["GPU-a", "GPU-b"]
    assert (watch.told[0]["driver"], watch.told[0]["gpus"][0]["pcie_link_width_most"]) == ("580.65.06", 16)
    assert watch.sampler.free_bytes == 5.0
    lost.lost = True
    for _ in range(6):
        row = watch.poll()
    assert prefixes(row) == {"node_gpu1"}
    assert watch.sampler.free_bytes is None, "it is not told from memory"
    library.events.append((lost, 79))
    assert watch.poll(2)["gpu/xid"] == 79.0
    assert watch.kinds() == [("found", None), ("lost", "GPU-a"), ("xid", "GPU-a")]


class Flaky(FakeNvml):
    """From call number `first` on, two calls of NVML fail with that code."""

    first, code = 0, 0

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if not name.startswith("nvml") or not callable(found) or isinstance(found, type):
            return found

        def call(*arguments: Any) -> Any:
            self.first -= 1
            if -2 <= self.first < 0:
                raise pynvml.NVMLError(self.code)
            return found(*arguments)

        return call


@pytest.mark.fault
@pytest.mark.parametrize("code", [1, 3, 6, 15, 999])  # one of each way in which the door takes them
def test_a22_whatever_call_fails_what_answers_goes_on(code: int) -> None:
    """At the start as in the midst: once the question for the driver's version ended the sampling for the whole run."""
    for first in range(0, 80, 3):
        library = Flaky(FakeGpu(gpm={2: 50.0}, processes=[Running(1, 5, 3)]), FakeGpu("GPU-2", pci="00000000:3C:00.0"))
        library.first, library.code = first, code
        watch = Watch(library, environ={"CUDA_VISIBLE_DEVICES": "GPU-11111111"})
        watch.poll(60)
        assert watch.rows or {what for what, _ in watch.kinds()} & {"unavailable", "lost"}, (first, watch.told)


def test_every_name_is_in_the_catalogue_and_told_of_some_device() -> None:
    gpm, fields = dict.fromkeys((2, 3, 5, 10, 20, 21, 60, 61), 1.0), dict.fromkeys(range(160), 1)
    names: set[str] = set()
    for gpu in (FakeGpu(gpm=gpm, fields=fields), FakeGpu(fields=fields)):
        gpu.processes = [Running(os.getpid(), 10, 10)]
        library = FakeNvml(gpu, FakeGpu(uuid="GPU-x"))
        watch = Watch(library, environ={"CUDA_VISIBLE_DEVICES": gpu.uuid})
        library.events.append((gpu, 13))
        watch.train(gpu, 15, 1.0, steps=2)
        names |= {name for row in watch.rows for name in row}
    assert {name for name in names if name not in CATALOGUE and not name.startswith("node_gpu")} == set()
    assert metric("node_gpu1/power_w").unit == "W"
    assert {name for name in CATALOGUE if name.startswith("gpu/")} <= names
