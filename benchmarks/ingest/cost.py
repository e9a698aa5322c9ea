"""What a request to the ingest routes costs the server: CPU by thread, real HTTP, a real `perfagent up`.

    PYTHONPATH=benchmarks:tests python benchmarks/ingest/cost.py [--quick] [--kinds frame,log1] [--compare CHECKOUT] [--write]

64 connections send requests. Each connection sends its next request when the previous one is answered. The kernel counts
the CPU time of the server: of the event loop's thread, and of all threads. With --compare, a server of another checkout is
measured in turns with this one, so that both see the same load on the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "engine"))

import measure
import psutil
import tables
from builders import ServerProcess

from perfagent.wire import encode

CONNECTIONS = 64
METRICS = 10

Body = Callable[[int, int], bytes]
"""(connection, number of its request) -> what it sends."""


def frame_body(connection: int, number: int) -> bytes:
    """One step of 63 series, as an agent sends it."""
    return encode(measure.frame(random.Random(number), connection, 0, 1, number, at=time.time()))


def rows_body(count: int) -> Body:
    """So many rows of ten metrics as JSON, each a step."""

    def body(connection: int, number: int) -> bytes:
        first = (number - 1) * count + 1
        rows = [
            {
                "run": f"json{connection}",
                "step": step,
                "metrics": {f"metric/{at}": step / 7 + at for at in range(METRICS)},
            }
            for step in range(first, first + count)
        ]
        return json.dumps(rows[0] if count == 1 else rows).encode()

    return body


@dataclass(frozen=True)
class Kind:
    what: str
    path: str
    media_type: str
    body: Body
    rows: int


KINDS = {
    "frame": Kind("frame of 63 series x 1 step", "/api/v1/ingest", "application/x-msgpack", frame_body, 1),
    **{
        f"log{rows}": Kind(f"{rows} rows of {METRICS}", "/api/v1/log", "application/json", rows_body(rows), rows)
        for rows in (1, 10, 1000)
    },
}


@dataclass
class Cost:
    """Of one burst of requests, with all times in seconds."""

    requests: int
    took: float
    loop: float
    process: float


class Side:
    """A running server and how far each connection's requests of each kind are."""

    def __init__(self, name: str, server: ServerProcess) -> None:
        self.name, self.port = name, server.port
        self._process = psutil.Process(server.process.pid)  # type: ignore[union-attr]
        self._sent: dict[tuple[str, int], int] = {}

    def _cpu(self) -> tuple[float, float]:
        """(event loop, all threads)."""
        threads = {thread.id: thread.user_time + thread.system_time for thread in self._process.threads()}
        return threads[self._process.pid], sum(self._process.cpu_times()[:2])

    def burst(self, name: str, seconds: float) -> Cost:
        kind = KINDS[name]
        loop, process = self._cpu()
        begun = time.perf_counter()
        requests = asyncio.run(self._burst(name, kind, begun + seconds))
        took = time.perf_counter() - begun
        time.sleep(0.3)  # what reads behind the ack ends
        loop_after, process_after = self._cpu()
        return Cost(requests, took, loop_after - loop, process_after - process)

    async def _burst(self, name: str, kind: Kind, end: float) -> int:
        done = await asyncio.gather(*(self._connection(name, kind, number, end) for number in range(CONNECTIONS)))
        return sum(done)

    async def _connection(self, name: str, kind: Kind, connection: int, end: float) -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        done = 0
        while time.perf_counter() < end:
            number = self._sent[name, connection] = self._sent.get((name, connection), 0) + 1
            body = kind.body(connection, number)
            head = (
                f"POST {kind.path} HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\nContent-Type: {kind.media_type}\r\n"
                f"Accept: application/json\r\nUser-Agent: perfagent\r\nContent-Length: {len(body)}\r\n\r\n"
            )
            writer.write(head.encode() + body)
            answer = (await reader.readuntil(b"\r\n\r\n")).lower()
            found = await reader.readexactly(int(answer.partition(b"content-length:")[2].partition(b"\r")[0]))
            if not answer.startswith(b"http/1.1 200"):
                raise SystemExit(f"{kind.path} answered {answer.decode()}{found.decode()}")
            done += 1
        writer.close()
        return done


@contextmanager
def running(name: str, folder: Path, checkout: Path | None) -> Iterator[Side]:
    """A server of this checkout, or of another one with the same environment."""
    environment = {}
    if checkout is not None:
        environment["PYTHONPATH"] = os.pathsep.join(str(checkout / part) for part in ("agent", "server"))
    server = ServerProcess(folder / name, env=environment, forked=False).start()
    try:
        yield Side(name, server)
    finally:
        server.stop()


def row(side: str, kind: Kind, costs: Sequence[Cost]) -> list[str]:
    def median(value: Callable[[Cost], float]) -> float:
        return statistics.median(value(cost) for cost in costs)

    return [
        kind.what, side, tables.figure(median(lambda cost: 1e6 * cost.loop / cost.requests)),
        tables.figure(median(lambda cost: 1e6 * cost.process / cost.requests)),
        tables.figure(median(lambda cost: cost.requests / cost.process)),
        tables.figure(median(lambda cost: kind.rows * cost.requests / cost.process)),
        tables.figure(median(lambda cost: cost.requests / cost.took)),
    ]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few seconds: to see that it works, not to quote")
    parser.add_argument("--kinds", default=",".join(KINDS), help=f"with commas between: {', '.join(KINDS)}")
    parser.add_argument("--compare", type=Path, metavar="CHECKOUT", help="another checkout, measured in turn")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--write", action="store_true", help="put the table into docs/evidence/benchmarks.md")
    options = parser.parse_args()
    rounds, seconds = options.rounds or (1 if options.quick else 5), 1.0 if options.quick else 3.0
    kinds = options.kinds.split(",")
    with tempfile.TemporaryDirectory(prefix="perfagent-cost-") as folder, ExitStack() as stack:
        sides = [stack.enter_context(running("here", Path(folder), None))]
        if options.compare:
            sides.insert(0, stack.enter_context(running("there", Path(folder), options.compare.resolve())))
        found: dict[tuple[str, str], list[Cost]] = {}
        for side in sides:
            for kind in kinds:
                side.burst(kind, 0.5)  # runs and series begin
        for _ in range(rounds):
            for kind in kinds:
                for side in sides:
                    found.setdefault((kind, side.name), []).append(side.burst(kind, seconds))
    head = [
        "request", "server", "event loop, CPU µs per request", "all threads, CPU µs per request", "requests per core-second",
        "rows per core-second", "requests/s",
    ]  # fmt: skip
    rows = [row(side, KINDS[kind], costs) for (kind, side), costs in found.items()]
    text = (
        f"{tables.machine()}. {CONNECTIONS} connections, medians over {rounds} rounds of {seconds:.0f} s.\n\n"
        f"{tables.table(head, rows)}"
    )
    print(text)
    if options.write:
        tables.replace("ingest", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
