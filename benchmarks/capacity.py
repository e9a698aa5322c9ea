"""What a sample costs a server, end to end: CPU, bytes on the wire, bytes on disk, memory; and what a fleet then costs.

    PYTHONPATH=benchmarks:tests python benchmarks/capacity.py [--quick] [--write]

A real `perfagent up` takes frames over HTTP as agents send them: a rank makes two steps a second with 20 series each,
its sampler writes 25 series once a second, and a frame goes out every three seconds: 195 samples. The frames are sent as
fast as the server acknowledges them, with times three seconds apart, so that hours of training pass in a minute; the
server's own CPU time is counted, that of the sender is not. Then the runs end, and it is waited until all samples are in
blocks: storing, judging by all rules and packing are all in the figures. --write puts the tables into docs/server/capacity.md.
"""

from __future__ import annotations

import argparse
import sqlite3
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import psutil
import tables
from builders import ServerProcess, until
from prometheus_client.parser import text_string_to_metric_families

from perfagent.delivery.transport import packed
from perfagent.wire import PHASES, Event, Frame, Group, encode

PAGE = Path(__file__).resolve().parents[1] / "docs" / "server" / "capacity.md"
PERIOD_S = 3.0
STEPS, READINGS = 6, 3  # of a frame
DEVICE = ("loss", "grad/norm", "lr", *(f"grad_norm/blocks.{number}.weight" for number in range(5)))  # float32
TIMES = ("step_time_s", "tokens_per_s", *(f"phase/{phase}_s" for phase in PHASES))[:12]
SAMPLED = (
    "gpu/utilization_pct", "gpu/memory_used_bytes", "gpu/power_w", "gpu/temperature_c", "gpu/sm_clock_hz",
    "host/cpu_pct", "host/memory_used_bytes", "process/cpu_pct", "process/rss_bytes", "cuda/allocated_bytes",
    *(f"bench/reading_{number}" for number in range(15)),
)  # fmt: skip
FLEETS = (1_000, 10_000, 100_000)
DAYS = 30
FULL_DAYS, CELL_DAYS = 14, 90  # of the retention that the page computes with
CELLS, COARSE = "cells of 16 steps", "256 steps"
HEADROOM = 0.5  # of a core may be in use


@dataclass
class Measured:
    """Of one server. cpu_s: of its process, from the first frame until all samples are in blocks; idle_rss, rss: bytes."""

    runs: int
    frames: int
    samples: int
    wire_bytes: int
    cpu_s: float
    disk_bytes: int
    idle_rss: int
    rss: int
    ack_ms: list[float]
    thinner_bytes: dict[str, int]
    """What is left on disk at each coarser resolution."""

    @property
    def cpu_us(self) -> float:
        return 1e6 * self.cpu_s / self.samples

    @property
    def per_rank(self) -> float:
        """Samples a second."""
        return self.samples / self.frames / PERIOD_S


def frame(draw: np.random.Generator, run: int, seq: int, start: float) -> Frame:
    begin = start + (seq - 1) * PERIOD_S
    step = np.arange(STEPS) + (seq - 1) * STEPS
    at = begin + np.arange(STEPS) * PERIOD_S / STEPS
    loss = (2.0 + 0.05 * draw.standard_normal((len(DEVICE), STEPS))).astype(np.float32)
    took = 0.5 * (1 + 0.02 * np.abs(draw.standard_normal((len(TIMES), STEPS))))
    steps = Group(step, at, at, {**dict(zip(DEVICE, loss, strict=True)), **dict(zip(TIMES, took, strict=True))})
    read_at = begin + np.arange(READINGS, dtype=float)
    read = np.round(80 + 5 * draw.standard_normal((len(SAMPLED), READINGS)), 1)
    readings = Group(step[:: STEPS // READINGS], read_at, read_at, dict(zip(SAMPLED, read, strict=True)))
    events = [Event(kind="state", time=begin, data={"state": "running"})] if seq == 1 else []
    return Frame(
        project="bench", run=f"run{run}", source=f"run{run}-0", attempt=1, rank=0, seq=seq, groups=[steps, readings],
        events=events,
    )  # fmt: skip


def measure(folder: Path, *, runs: int, frames: int) -> Measured:
    server = ServerProcess(folder, env={"PERFAGENT_METRICS_RUNS": "0"}).start()
    try:
        return _measured(server, runs, frames)
    finally:
        server.stop()


def _measured(server: ServerProcess, runs: int, frames: int) -> Measured:
    assert server.process is not None
    process = psutil.Process(server.process.pid)
    idle_rss, before_disk, before_cpu = process.memory_info().rss, _disk(server), _cpu_s(process)
    start = time.time() - frames * PERIOD_S
    sizes, acks = [0] * runs, [[] for _ in range(runs)]  # type: list[int], list[list[float]]

    def send(run: int) -> None:
        draw = np.random.default_rng(run)
        with httpx.Client(trust_env=False, timeout=120.0, headers={"Content-Type": "application/x-msgpack"}) as client:
            for seq in range(1, frames + 1):
                body = encode(frame(draw, run, seq, start))
                sizes[run] += len(packed(body, loopback=False)[0])  # as to a server on another machine
                _post(client, server.url, body, acks[run])
            over = Event(kind="state", time=time.time(), data={"state": "finished"})
            end = Frame(
                project="bench", run=f"run{run}", source=f"run{run}-0", attempt=1, rank=0, seq=frames + 1, events=[over]
            )
            _post(client, server.url, encode(end), acks[run])

    threads = [threading.Thread(target=send, args=(run,)) for run in range(runs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rss = process.memory_info().rss
    until(lambda: _metric(server, "perfagent_tail_rows") == 0, within_s=600.0, every_s=2.0, why="the tail is not empty")
    samples = runs * frames * (STEPS * (len(DEVICE) + len(TIMES)) + READINGS * len(SAMPLED))
    assert _metric(server, "perfagent_ingest_samples_total") == samples, "a sample is missing"
    return Measured(
        runs, runs * frames, samples, sum(sizes), _cpu_s(process) - before_cpu, _disk(server) - before_disk, idle_rss, rss,
        [value for each in acks for value in each], _thinner(server, _disk(server) - before_disk),
    )  # fmt: skip


def _thinner(server: ServerProcess, left: int) -> dict[str, int]:
    """What retention expects to be left of so many bytes when it takes each of its steps for all runs."""
    server.admin("PUT", "/retention", {"max_bytes": 1})
    [budget] = server.get("/retention/preview")["budgets"]
    found = {}
    for action, words in (("samples", CELLS), ("rollup16", COARSE), ("rollup256", "4096 steps")):
        left -= sum(step["bytes"] for step in budget["steps"] if step["action"] == action)
        found[words] = left
    return found


def _post(client: httpx.Client, url: str, body: bytes, acks: list[float]) -> None:
    """Sends until it is stored: a server that is behind says so."""
    while True:
        begin = time.perf_counter()
        answer = client.post(f"{url}/api/v1/ingest", content=body)
        if answer.status_code == 200:
            acks.append(1e3 * (time.perf_counter() - begin))
            return
        assert answer.status_code in (429, 503), answer.text
        time.sleep(0.5)


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _disk(server: ServerProcess) -> int:
    """Bytes of the database file in use, without its log and without free pages."""
    with sqlite3.connect(server.folder / "server-data" / "perfagent.db") as connection:
        pages, free, size = (
            connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size")
        )
    connection.close()
    return int((pages - free) * size)


def _metric(server: ServerProcess, name: str) -> float:
    """The first sample of this name."""
    text = httpx.get(f"{server.url}/metrics", trust_env=False, timeout=60.0).text
    found = [one.value for family in text_string_to_metric_families(text) for one in family.samples if one.name == name]
    if name == "perfagent_ingest_samples_total":
        return max(found)  # stored, duplicate, rejected: the others are 0
    return found[0]


def costs(found: Measured) -> str:
    acks = sorted(found.ack_ms)
    p50, p99 = (acks[len(acks) * share // 100] for share in (50, 99))
    a_run = (found.rss - found.idle_rss) / found.runs / 2**20
    rows = [
        ["CPU of the server", f"{found.cpu_us:.2f} µs", f"{1e3 * found.cpu_s / found.frames:.2f} ms"],
        ["on the wire", *_bytes(found.wire_bytes, found)],
        ["on disk, full resolution", *_bytes(found.disk_bytes, found)],
        *(["on disk, " + words, *_bytes(left, found)] for words, left in found.thinner_bytes.items()),
    ]
    head = f"{tables.machine()}. {found.runs} runs, {found.frames:,} frames, {found.samples:,} samples."
    rest = (
        f"Memory of the server: {found.idle_rss / 2**20:.0f} MiB without runs, and {a_run:.1f} MiB for each run that goes on. "
        f"Acknowledgements while frames came as fast as they could: p50 {p50:.0f} ms, p99 {p99:.0f} ms."
    )
    return f"{head}\n\n{tables.table(['cost', 'a sample', 'a frame'], rows)}\n\n{rest}"


def _bytes(total: int, found: Measured) -> tuple[str, str]:
    return f"{total / found.samples:.2f} bytes", f"{total / found.frames:,.0f} bytes"


def fleets(found: Measured) -> str:
    """One rank is one GPU."""
    rows = []
    for gpus in FLEETS:
        rate = gpus * found.per_rank
        megabits = 8 * rate * found.wire_bytes / found.samples / 1e6
        cores = rate * found.cpu_us / 1e6
        daily = rate * 86_400 * found.disk_bytes / found.samples
        figures = (gpus, gpus / PERIOD_S, rate, megabits, cores, np.ceil(cores / HEADROOM), daily / 1e9)
        of_cells, of_coarse = (daily * found.thinner_bytes[left] / found.disk_bytes for left in (CELLS, COARSE))
        kept = FULL_DAYS * daily + (CELL_DAYS - FULL_DAYS) * of_cells
        terabytes = (DAYS * daily, kept, kept + (365 - CELL_DAYS) * of_coarse)
        rows.append([*(f"{value:,.0f}" for value in figures), *(f"{value / 1e12:,.2f}" for value in terabytes)])
    head = [
        "GPUs",
        "frames/s",
        "samples/s",
        "Mbit/s",
        "cores in use",
        "cores to have",
        "GB a day",
        f"TB in {DAYS} days",
        f"TB, {CELL_DAYS} days kept",
        "TB, a year kept",
    ]
    return tables.table(head, rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few frames: to see that it works, not to quote")
    parser.add_argument("--runs", type=int, default=8)
    parser.add_argument("--frames", type=int, default=2400, help="of each run: two hours of training")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/server/capacity.md")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="perfagent-bench-capacity-") as folder:
        found = measure(Path(folder), runs=arguments.runs, frames=100 if arguments.quick else arguments.frames)
    print(costs(found), fleets(found), sep="\n\n")
    if arguments.write:
        tables.replace("capacity", costs(found), PAGE)
        tables.replace("fleets", fleets(found), PAGE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
