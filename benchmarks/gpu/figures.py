"""What the agent recorded of the device while a training ran, beside what nvidia-smi said at the same time."""

from __future__ import annotations

import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator

from report import Result, compared, not_checked
from stage import Stage
from training import Child, Recording, recorded

WARM_UP_S, WATCHED_S = 6, 20

# series of the agent: field of nvidia-smi, unit, factor of our figure, how far the means may be apart: share, and in
# units
PLAIN: dict[str, tuple[str, str, float, float, float]] = {
    "gpu/utilization_pct": ("utilization.gpu", "%", 1.0, 0.05, 5.0),
    "gpu/memory_busy_pct": ("utilization.memory", "%", 1.0, 0.1, 5.0),
    "gpu/memory_used_bytes": ("memory.used", "MiB", 2.0**-20, 0.01, 64.0),
    "gpu/memory_total_bytes": ("memory.total", "MiB", 2.0**-20, 0.01, 1.0),
    "gpu/power_w": ("power.draw.average", "W", 1.0, 0.05, 10.0),
    "gpu/temperature_c": ("temperature.gpu", "°C", 1.0, 0.0, 2.0),
    "gpu/sm_clock_mhz": ("clocks.sm", "MHz", 1.0, 0.03, 30.0),
    "gpu/memory_clock_mhz": ("clocks.mem", "MHz", 1.0, 0.01, 1.0),
    "gpu/power_limit_w": ("enforced.power.limit", "W", 1.0, 0.01, 1.0),
    "gpu/pcie_link_width": ("pcie.link.width.current", "lanes", 1.0, 0.0, 0.0),
    "gpu/pcie_link_generation": ("pcie.link.gen.current", "", 1.0, 0.0, 0.0),
}
GPM: dict[str, tuple[int, str]] = {  # series: number and column of `nvidia-smi dmon --gpm-metrics`
    "gpu/sm_active_pct": (2, "SM activity"),
    "gpu/sm_occupancy_pct": (3, "SM occupancy"),
    "gpu/tensor_active_pct": (5, "tensor activity"),
    "gpu/dram_active_pct": (10, "memory bandwidth in use"),
}


def check(stage: Stage) -> list[Result]:
    folder = stage.recording("figures")
    child = Child(stage.size("real"), stage.device, record=folder)
    if stage.dry:
        child.ask("load 1")
        child.end()
        return [not_checked(name, "no GPU") for name in (*PLAIN, "gpu/energy_per_step_j", *GPM)]
    board = _board()
    # an older driver knows fewer
    fields = [field for field, *_ in PLAIN.values() if list(_rows(_query(board, [field]), _cells))]
    child.ask(f"load {WARM_UP_S}")
    child.tell(f"load {WATCHED_S}")
    time.sleep(1.0)  # into the steady part of the load
    plain, gpm = _watched(board, fields, WATCHED_S - 4)
    told = child._answer()
    span = (told["begin"] + 1.0, told["begin"] + WATCHED_S - 3.0)
    child.end()
    recording = recorded(folder)
    return [
        *(_plain(name, recording, span, plain) for name in PLAIN),
        _energy(recording, span, plain, told),
        *(_gpm(name, recording, span, gpm) for name in GPM),
    ]


def _board() -> str:
    """The training's GPU as nvidia-smi names it: it counts by PCI address, and boards that this process does not see
    too."""
    import torch

    return f"GPU-{torch.cuda.get_device_properties(0).uuid}"


def _watched(board: str, fields: list[str], seconds: int) -> tuple[dict[str, list[float]], dict[int, list[float]]]:
    """Readings of nvidia-smi twice a second, and of its GPM columns once a second."""
    plain: dict[str, list[float]] = {}
    gpm: dict[int, list[float]] = {}
    numbers = [number for number, _ in GPM.values()]
    metrics = ",".join(map(str, numbers))
    watch = ["nvidia-smi", "dmon", "-i", board, "-s", "p", f"--gpm-metrics={metrics}", "-d", "1", "-c", str(seconds)]

    def dmon() -> None:
        for row in _rows(watch, str.split):
            if len(row) < 4 + len(numbers):  # device, power and two temperatures, then what was asked for
                continue
            for number, cell in zip(numbers, row[-len(numbers) :], strict=True):
                if (value := _number(cell)) is not None:
                    gpm.setdefault(number, []).append(value)

    thread = threading.Thread(target=dmon)
    thread.start()
    until = time.monotonic() + seconds
    while fields and time.monotonic() < until:
        for row in _rows(_query(board, fields), _cells):
            for field, cell in zip(fields, row, strict=True):
                if (value := _number(cell)) is not None:
                    plain.setdefault(field, []).append(value)
        time.sleep(0.3)
    thread.join()
    return plain, gpm


def _query(board: str, fields: list[str]) -> list[str]:
    return ["nvidia-smi", "-i", board, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]


def _cells(line: str) -> list[str]:
    return line.split(",")


def _rows(command: list[str], split: Callable[[str], list[str]]) -> Iterator[list[str]]:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    except FileNotFoundError:  # a container without it
        return
    if done.returncode == 0:
        for line in done.stdout.splitlines():
            if line.strip() and not line.startswith("#"):
                yield split(line)


def _number(cell: str) -> float | None:
    """None for [N/A], - and the like."""
    try:
        return float(cell.strip())
    except ValueError:
        return None


def _plain(name: str, recording: Recording, span: tuple[float, float], plain: dict[str, list[float]]) -> Result:
    field, unit, factor, share, within = PLAIN[name]
    ours, theirs = recording.values(name, times=span), plain.get(field, [])
    if not theirs:
        return _absent(name, ours, f"nvidia-smi does not tell {field}")
    if not ours:
        return Result(name, f"{statistics.mean(theirs):.4g} {unit}", "nothing was recorded", "FAIL")
    mine, other = factor * statistics.mean(ours), statistics.mean(theirs)
    return compared(name, mine, other, unit=unit, share=share, within=within, source=f"nvidia-smi {field}")


def _absent(name: str, ours: list[float], reason: str) -> Result:
    return not_checked(
        name, reason + (f"; the agent told {statistics.mean(ours):.4g}" if ours else "; nor does the agent")
    )


def _energy(
    recording: Recording, span: tuple[float, float], plain: dict[str, list[float]], told: dict[str, float]
) -> Result:
    name, power = "gpu/energy_per_step_j", plain.get("power.draw.average", [])
    ours = recording.values(name, times=span)
    if not power or not ours:
        return _absent(
            name, ours, "nvidia-smi does not tell its power" if not power else "the device has no energy counter"
        )
    step_s = told["wall_s"] / told["steps"]
    other = statistics.mean(power) * step_s
    return compared(name, statistics.mean(ours), other, unit="J", share=0.08, source="nvidia-smi's power x step time")


def _gpm(name: str, recording: Recording, span: tuple[float, float], gpm: dict[int, list[float]]) -> Result:
    number, words = GPM[name]
    ours, theirs = recording.values(name, times=span), gpm.get(number, [])
    if not theirs:
        return _absent(f"{name} ({words})", ours, "nvidia-smi dmon does not tell it here")
    if not ours:
        return Result(name, f"{statistics.mean(theirs):.4g} %", "nothing was recorded", "FAIL")
    return compared(
        name, statistics.mean(ours), statistics.mean(theirs), unit="%", share=0.1, within=5.0, source="nvidia-smi dmon"
    )
