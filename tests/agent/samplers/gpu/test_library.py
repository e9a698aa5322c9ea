"""All of it through the real pynvml, into a library in C: structures, versions and pointers as the driver gets them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.real

WATCHED = """
import ctypes, json, sys
from pathlib import Path
import pynvml
from perfagent.samplers.gpu.claims import Claims
from perfagent.samplers.gpu.sampler import GpuSampler

now, rows, told = [100.0], [], []

def load():
    pynvml.nvmlInit()
    return pynvml, ""

sampler = GpuSampler(
    rows.append, told.append, ordinal=lambda: 0, step=lambda: int(now[0]), elected=lambda: True, period_s=lambda: 1.0,
    environ={}, claims=Claims(Path(), None), library=load, clock=lambda: now[0],
)

def poll(times):
    for _ in range(times):
        sampler.poll()
        now[0] += 0.5

poll(24)
pynvml.nvmlShutdown()
poll(2)
before = len(rows)
poll(24)
ctypes.CDLL("libnvidia-ml.so.1").fall_off_the_bus()
poll(4)
last = {}
for row in rows:
    last.update(row)
json.dump({"last": last, "told": told, "rows": len(rows) - before, "free": sampler.free_bytes}, sys.stdout)
"""


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("nvml")
    source = Path(__file__).with_name("nvml.c")
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-o", str(folder / "libnvidia-ml.so.1"), str(source)], check=True, timeout=60
    )
    environment, command = os.environ | {"LD_LIBRARY_PATH": str(folder)}, [sys.executable, "-c", WATCHED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_every_figure_arrives_as_the_driver_tells_it(watched: dict[str, Any]) -> None:
    last = {name.removeprefix("gpu/"): value for name, value in watched["last"].items() if name.startswith("gpu/")}
    expected = {
        "utilization_pct": 97.0, "memory_busy_pct": 41.0, "memory_used_bytes": 30e9, "memory_total_bytes": 150e9,
        "power_w": 612.345, "power_limit_w": 700.0, "temperature_c": 61.0, "memory_temperature_c": 70.0,
        "sm_clock_mhz": 1980.0, "memory_clock_mhz": 3201.0, "throttle_sw_power_cap_pct": 100.0, "throttle_hw_slowdown_pct": 0.0,
        "pcie_link_generation": 5.0, "pcie_link_width": 16.0, "ecc_uncorrected_volatile": 4.0, "pcie_replays": 94.0,
        "remapped_rows_uncorrected": 143.0, "sm_active_pct": 3.0, "tensor_active_pct": 7.5, "pcie_sent_bytes_per_s": 30.0 * 2**20,
        "process_memory_bytes": 12345678.0, "process_utilization_pct": 55.0, "other_processes": 1.0,
    }  # fmt: skip
    assert {name: last.get(name) for name in expected} == expected
    assert not {"fan_pct", "nvlink_crc_flit_errors", "nvlink_sent_bytes_per_s", "other_memory_bytes"} & last.keys()
    assert 0.0 < last["energy_j"] < 100.0  # of a counter that stood at a million kilojoules
    assert watched["free"] == 150e9 - 0.6e9 - 30e9


def test_a_shutdown_by_the_script_and_a_gpu_that_falls_off_the_bus(watched: dict[str, Any]) -> None:
    assert watched["rows"] > 0
    assert [told["what"] for told in watched["told"]] == ["found", "lost", "xid"]
    found, lost, xid = watched["told"]
    assert (found["driver"], found["gpus"][1]["name"], found["gpus"][1]["gpm"]) == ("580.65.06", "NVIDIA H200", True)
    assert (lost["index"], lost["uuid"], lost["reason"]) == (1, "GPU-bb", "GPU is lost")
    assert (xid["code"], xid["index"], xid["uuid"]) == (79, 1, "GPU-bb")
    assert watched["last"]["node_gpu1/xid"] == 79.0
