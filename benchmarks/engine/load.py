"""How fast a server acknowledges a thousand agents while a fleet page is open: real HTTP, a real `perfagent up`.

    PYTHONPATH=benchmarks:tests python benchmarks/engine/load.py [--quick] [--agents 1000] [--seconds 60] [--no-fleet] [--write]

Each agent is a run of its own with a connection that stays open. It sends a frame of 63 series and one step every three
seconds, or every second while the server tells it that a page shows its run. All agents live in one process with a lower
priority than the server (nice 10), which also tells how late it was itself: then its figures say little about the
server. An acknowledgement is timed from the first byte sent to the last byte received.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path

import measure
import psutil
import tables
from builders import ServerProcess
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from perfagent.wire import encode

NICE = 10
PERIOD_S = 3.0
WATCHED_PERIOD_S = 1.0
WARM_S = 12.0  # runs begin, and pages learn of them
NAMES = ("loss", "tokens_per_s", "samples_per_s", "gpu/utilization_pct")  # what the fleet page shows


@dataclass
class Times:
    """What the agents saw, in seconds. late: how long after its time each frame was sent."""

    acks: list[float] = field(default_factory=list)
    late: list[float] = field(default_factory=list)
    refused: int = 0


@dataclass
class Page:
    """What the fleet page received."""

    messages: int = 0
    bytes: int = 0
    lagged: int = 0


def play_agents(port: int, agents: int, seconds: float) -> Times:
    """Plays the agents in this process; answers what they saw after WARM_S."""
    return asyncio.run(_play(port, agents, seconds))


async def _play(port: int, agents: int, seconds: float) -> Times:
    times, draw = Times(), random.Random(1)
    begin = time.perf_counter() + 1.0
    starts = [begin + PERIOD_S * draw.random() for _ in range(agents)]
    await asyncio.gather(*(_agent(port, number, start, begin, seconds, times) for number, start in enumerate(starts)))
    return times


async def _agent(port: int, number: int, start: float, begin: float, seconds: float, times: Times) -> None:
    draw = random.Random(number)
    due, step = start, 0
    await asyncio.sleep(max(0.0, due - 1.0 - time.perf_counter()))
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    while due < begin + WARM_S + seconds:
        step += 1
        body = encode(measure.frame(draw, number, 0, 1, step, at=time.time()))
        head = f"POST /api/v1/ingest HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/x-msgpack\r\n"
        await asyncio.sleep(due - time.perf_counter())
        sent = time.perf_counter()
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        answer = (await reader.readuntil(b"\r\n\r\n")).lower()
        await reader.readexactly(int(answer.partition(b"content-length:")[2].partition(b"\r")[0]))
        if due >= begin + WARM_S:
            times.acks.append(time.perf_counter() - sent)
            times.late.append(sent - due)
            times.refused += not answer.startswith(b"http/1.1 200")
        period = PERIOD_S if b"perfagent-watched: 0" in answer else WATCHED_PERIOD_S
        due = max(due + period, time.perf_counter())  # an agent has one frame on the way
    writer.close()


def look_at_fleet(url: str, page: Page, stop: threading.Event) -> None:
    """Reads what the fleet page would, until the server or the measurement ends."""
    wanted = {"subscribe": {"fleet": True, "names": NAMES}}
    with suppress(ConnectionClosed), connect(url.replace("http", "ws") + "/ws/live", max_size=None) as socket:
        socket.send(json.dumps(wanted))
        while not stop.is_set():
            with suppress(TimeoutError):
                message = socket.recv(timeout=1.0)
                page.messages += 1
                page.bytes += len(message)
                page.lagged += "lagged" in json.loads(message)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few seconds: to see that it works, not to quote")
    parser.add_argument("--agents", type=int, default=1000)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--no-fleet", action="store_true", help="without the fleet page only")
    parser.add_argument("--write", action="store_true", help="put the table into docs/evidence/benchmarks.md")
    options = parser.parse_args()
    seconds = options.seconds or (10.0 if options.quick else 60.0)
    rows = [run(options.agents, seconds, with_page) for with_page in (() if options.no_fleet else (True,)) + (False,)]
    head = [
        "fleet page", "frames/s", "ack p50 ms", "p99 ms", "slowest ms", "agents late p50 ms", "p99 ms",
        "server CPU, cores", "server RSS MB", "page: messages/s", "kB/s",
    ]  # fmt: skip
    text = (
        f"{tables.machine()}. {options.agents} agents, a frame of 63 series x 1 step each every {PERIOD_S:.0f} s, for "
        f"{seconds:.0f} s.\n\n{tables.table(head, rows)}"
    )
    print(text)
    if options.write:
        tables.replace("load", text)
    return 0


def run(agents: int, seconds: float, with_page: bool) -> list[str]:
    """One row of the table, measured on a fresh server."""
    page, stop = Page(), threading.Event()
    with tempfile.TemporaryDirectory(prefix="perfagent-load-") as folder:
        server = ServerProcess(Path(folder) / "server", forked=False).start()
        looking = threading.Thread(target=look_at_fleet, args=(server.url, page, stop))
        try:
            if with_page:
                looking.start()
            process = psutil.Process(server.process.pid)  # type: ignore[union-attr]
            with ProcessPoolExecutor(1, get_context("spawn"), initializer=os.nice, initargs=(NICE,)) as pool:
                playing = pool.submit(play_agents, server.port, agents, seconds)
                time.sleep(WARM_S + 2.0)
                cpu, began, seen = sum(process.cpu_times()[:2]), time.perf_counter(), (page.messages, page.bytes)
                times = playing.result()
            took = time.perf_counter() - began
            cpu = sum(process.cpu_times()[:2]) - cpu
            resident = process.memory_info().rss
            messages, received = page.messages - seen[0], page.bytes - seen[1]
        finally:
            stop.set()
            if with_page:
                looking.join()
            server.stop()
    print(f"  refused {times.refused}, page lagged {page.lagged} times", file=sys.stderr)
    return [
        "open" if with_page else "none", f"{len(times.acks) / seconds:.0f}", *map(milliseconds, spread(times.acks)),
        *map(milliseconds, spread(times.late)[:2]), f"{cpu / took:.2f}", f"{resident / 1e6:.0f}", f"{messages / took:.1f}",
        f"{received / took / 1e3:.0f}",
    ]  # fmt: skip


def spread(values: list[float]) -> tuple[float, float, float]:
    """p50, p99, largest."""
    ordered = sorted(values)
    return ordered[len(ordered) // 2], ordered[len(ordered) * 99 // 100], ordered[-1]


def milliseconds(value: float) -> str:
    return tables.figure(1000 * value)


if __name__ == "__main__":
    sys.exit(main())
