"""What one noisy run does to the others: their acknowledgements with and without it, and with and without the limits.

    PYTHONPATH=benchmarks:tests python benchmarks/ingest/noisy.py [--quick] [--agents 50] [--write]

The others are the simulated agents of `perfagent bench ingest`, a frame of 63 series a second each. The noisy run sends
frames of 1000 series x 100 steps over ten connections, as fast as it is let in, and heeds no Retry-After. Each load runs on
a fresh server, and the loads take turns. The noisy process has a lower priority (nice 10) than the server.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import tables
from builders import ServerProcess

from perfagent.wire import Frame, Group, encode
from perfagent_server.ingest_benchmark.agents import Load, Seen, play

SERIES, STEPS, CONNECTIONS = 1000, 100, 10
WARM_S = 8.0
"""Runs begin; the noisy one empties what ten seconds of its limits let in at once."""
ENDLESS = {f"PERFAGENT_{name}": "inf" for name in ("REQUESTS_PER_S", "SAMPLES_PER_S", "BYTES_PER_S")}
LOADS = {"nobody": (False, {}), "a noisy run": (True, {}), "a noisy run, no limits": (True, ENDLESS)}


@dataclass
class Noise:
    samples: int = 0
    refused: int = 0


def bodies() -> Iterator[bytes]:
    """The frames of the noisy run, each with new samples."""
    column = np.random.default_rng(1).normal(size=STEPS).astype("<f4").tobytes()
    values = {f"layer/{name}/norm": column for name in range(SERIES)}
    for seq in itertools.count(1):
        steps = np.arange(seq * STEPS, (seq + 1) * STEPS, dtype="<i8")
        times = (time.time() + 0.01 * steps).astype("<f8").tobytes()
        group = Group(steps.tobytes(), times, times, values)
        yield encode(Frame(project="bench", run="noisy", source="noisy", attempt=1, rank=0, seq=seq, groups=[group]))


def make_noise(port: int, begin: float, end: float) -> Noise:
    return asyncio.run(_noise(port, begin, end))


async def _noise(port: int, begin: float, end: float) -> Noise:
    noise, ready = Noise(), bodies()
    await asyncio.sleep(begin - time.monotonic())

    async def connection() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while time.monotonic() < end:
            body = next(ready)
            head = (
                "POST /api/v1/ingest HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/x-msgpack\r\n"
                f"Content-Length: {len(body)}\r\n\r\n"
            )
            writer.write(head.encode() + body)
            answer = (await reader.readuntil(b"\r\n\r\n")).lower()
            await reader.readexactly(int(answer.partition(b"content-length:")[2].partition(b"\r")[0]))
            if answer.startswith(b"http/1.1 200"):
                noise.samples += SERIES * STEPS
            else:
                noise.refused += 1
                await asyncio.sleep(0.05)
        writer.close()

    await asyncio.gather(*(connection() for _ in range(CONNECTIONS)))
    return noise


def run(with_noise: bool, environment: dict[str, str], agents: int, seconds: float) -> tuple[Seen, Noise]:
    with tempfile.TemporaryDirectory(prefix="perfagent-noisy-") as folder:
        server = ServerProcess(Path(folder) / "server", env=environment, forked=False).start()
        try:
            begin = time.monotonic() + WARM_S + 2.0
            load = Load(
                url=server.url,
                key=None,
                tag="quiet",
                first=0,
                agents=agents,
                period_s=1.0,
                begin=begin,
                end=begin + seconds,
            )
            with (
                ProcessPoolExecutor(1, get_context("spawn")) as quiet,
                ProcessPoolExecutor(1, get_context("spawn"), initializer=os.nice, initargs=(10,)) as loud,
            ):
                playing = quiet.submit(play, load)
                noise = (
                    loud.submit(make_noise, server.port, begin - WARM_S + 1.0, load.end).result()
                    if with_noise
                    else Noise()
                )
                return playing.result(), noise
        finally:
            server.stop()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few seconds: to see that it works, not to quote")
    parser.add_argument("--agents", type=int, default=50)
    parser.add_argument("--write", action="store_true", help="put the table into docs/evidence/benchmarks.md")
    options = parser.parse_args()
    rounds, seconds = (1, 5.0) if options.quick else (2, 10.0)
    found: dict[str, list[tuple[Seen, Noise]]] = {name: [] for name in LOADS}
    for _ in range(rounds):
        for name, (with_noise, environment) in LOADS.items():
            found[name].append(run(with_noise, environment, options.agents, seconds))
    rows = []
    for name, results in found.items():
        ordered = [sorted(seen.acks) for seen, _ in results]
        places = [
            statistics.median(1000 * acks[int(share * len(acks))] for acks in ordered) for share in (0.5, 0.9, 0.99)
        ]
        rows.append([
            name, *map(tables.figure, places), tables.figure(sum(map(len, ordered)) / rounds / seconds),
            tables.figure(sum(noise.samples for _, noise in results) / rounds / seconds),
            tables.figure(sum(noise.refused for _, noise in results) / rounds / seconds),
        ])  # fmt: skip
    head = [
        "beside them", "ack p50 ms", "p90 ms", "p99 ms", "frames/s of the others", "samples/s of the noisy run", "its refusals/s"
    ]  # fmt: skip
    text = (
        f"{tables.machine()}. {options.agents} agents, a frame of 63 series per second each; medians over {rounds} rounds of "
        f"{seconds:.0f} s.\n\n{tables.table(head, rows)}"
    )
    print(text)
    if options.write:
        tables.replace("noisy", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
