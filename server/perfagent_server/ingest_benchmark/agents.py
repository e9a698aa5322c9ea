"""Simulated agents: each is a run with a connection that stays open, and sends frames as the real agent packs them.

An agent has one frame on the way. A frame is due once a period, whatever the answers take; what comes too late for its
time says that the machine of the agents is busy. Refusals and lost connections are followed as the agent does: the same
frame goes again after the time that the server asks for, so the server counts it once.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import ssl
import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from perfagent.delivery.transport import Answer, Reply, judge, packed
from perfagent.endpoint.addresses import is_loopback
from perfagent.wire import PHASES, Event, Frame, Group, encode

__all__ = ["HEALTHY", "NAMES", "Load", "Seen", "play"]

NAMES = (
    "loss", "lr", "grad/norm", "grad/nonfinite", "step_time_s", "samples_per_s", "tokens_per_s", "process/cpu_pct",
    "process/rss_bytes", "cuda/allocated_bytes", "cuda/reserved_bytes", "gpu/utilization_pct", "gpu/memory_used_bytes",
    "gpu/power_w", "gpu/temperature_c", "host/cpu_pct", "host/memory_used_bytes",
    *(f"phase/{phase}_s" for phase in PHASES), *(f"grad_norm/blocks.{place}.weight" for place in range(37)),
)  # fmt: skip
"""What a frame has of a step: the loop, its phases, a card, the host, and 37 layers."""
HEALTHY = {
    "grad/nonfinite": 0.0, "step_time_s": 0.1, "gpu/utilization_pct": 95.0, "phase/data_s": 0.0002, "phase/h2d_s": 0.001,
    "phase/forward_s": 0.03, "phase/backward_s": 0.055, "phase/optimizer_s": 0.01, "phase/comm_s": 0.002,
    "phase/checkpoint_s": 0.0, "phase/eval_s": 0.0, "phase/rollout_s": 0.0, "phase/other_s": 0.001,
}  # fmt: skip
"""Of the other series 2: a training on which no rule has anything to say."""
_TIMEOUT_S = 60.0
_RETRY_S = 1.0
_GIVES_UP_S = 120.0  # after the end, with a frame that is not acknowledged


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """first, agents: which agents this process plays, of all. begin: of the measurement, and until then they warm up;
    end: of both; time.monotonic() of this machine, seconds. tag: in the runs' ids. key: an API key."""

    url: str
    key: str | None
    tag: str
    first: int
    agents: int
    period_s: float
    begin: float
    end: float

    def run(self, number: int) -> str:
        return f"bench-{self.tag}-{number}"


@dataclass(slots=True)
class Seen:
    """What the agents saw. acks, late: seconds from sending a frame to its answer, and from when it was due to when it was
    sent, of the measurement. steps: by run, frames that were acknowledged, the warm-up's too. refused: answers 429 and
    503. lost_connections: and then a new one. problem: why a frame was given up."""

    acks: list[float] = field(default_factory=list)
    late: list[float] = field(default_factory=list)
    steps: dict[str, int] = field(default_factory=dict)
    refused: int = 0
    lost_connections: int = 0
    problem: str = ""

    def add(self, other: Seen) -> None:
        self.acks += other.acks
        self.late += other.late
        self.steps |= other.steps
        self.refused += other.refused
        self.lost_connections += other.lost_connections
        self.problem = self.problem or other.problem


def play(load: Load) -> Seen:
    """Plays the agents of a load in this process, until its end."""
    return asyncio.run(_play(load))


async def _play(load: Load) -> Seen:
    seen = Seen()
    agents = (_Agent(load, number, seen) for number in range(load.first, load.first + load.agents))
    await asyncio.gather(*(agent.live() for agent in agents))
    return seen


class _Agent:
    def __init__(self, load: Load, number: int, seen: Seen) -> None:
        self._load, self._run, self._seen = load, load.run(number), seen
        self._draw = random.Random(number)  # noqa: S311 - what a training measures, not a secret
        self._connection = _Connection(load)

    async def live(self) -> None:
        """From its first frame to its end."""
        load, seen = self._load, self._seen
        due = time.monotonic() + load.period_s * self._draw.random()
        step = 0
        try:
            while due < load.end:
                step += 1
                body = encode(self._frame(step))
                await asyncio.sleep(due - time.monotonic())
                sent = time.monotonic()
                await self._deliver(body)
                if load.begin <= sent < load.end:
                    seen.acks.append(time.monotonic() - sent)
                    seen.late.append(sent - due)
                seen.steps[self._run] = step
                due = max(due + load.period_s, time.monotonic())
            await self._deliver(encode(self._end(step + 1)))
        except _GaveUpError as error:
            seen.problem = str(error)
        finally:
            self._connection.close()

    async def _deliver(self, body: bytes) -> None:
        """Sends a frame until it is acknowledged. Raises _GaveUpError."""
        while True:
            try:
                async with asyncio.timeout(_TIMEOUT_S):
                    answer = await self._connection.post(body)
            except (OSError, EOFError, TimeoutError, ValueError) as error:
                self._connection.close()
                self._seen.lost_connections += 1
                answer = Answer(kind="retry", reason=f"{type(error).__name__} {error}")
            if answer.kind == "acked":
                return
            self._seen.refused += answer.pause_s is not None
            if answer.kind != "retry" or time.monotonic() > self._load.end + _GIVES_UP_S:
                raise _GaveUpError(f"{self._load.url} answered: {answer.reason}")
            await asyncio.sleep(answer.pause_s or _RETRY_S)

    def _frame(self, step: int) -> Frame:
        now = time.time()
        values = {name: _column(HEALTHY.get(name, 2.0) * (1 + 0.005 * self._draw.random())) for name in NAMES}
        row = Group(array("q", [step]).tobytes(), _column(now), _column(time.monotonic()), values)
        running = Event(kind="state", time=now, data={"state": "running", "world_size": 1})
        return self._made(step, [row], [running] if step == 1 else [])

    def _end(self, seq: int) -> Frame:
        return self._made(seq, [], [Event(kind="state", time=time.time(), data={"state": "finished"})])

    def _made(self, seq: int, groups: list[Group], events: list[Event]) -> Frame:
        return Frame(
            project="bench", run=self._run, source=self._run, attempt=1, rank=0, seq=seq, groups=groups, events=events,
            sent=time.time(),
        )  # fmt: skip


def _column(value: float) -> bytes:
    return array("d", [value]).tobytes()


class _GaveUpError(Exception):
    """A frame is not taken, and the message says why."""


class _Connection:
    """One connection to the server that is opened when it is needed. Raises OSError, EOFError and ValueError."""

    def __init__(self, load: Load) -> None:
        address = urlsplit(load.url)
        self._host = address.hostname or "127.0.0.1"
        self._tls = ssl.create_default_context() if address.scheme == "https" else None
        self._port = address.port or (443 if self._tls else 80)
        self._loopback = is_loopback(self._host)
        key = f"Authorization: Bearer {load.key}\r\n" if load.key else ""
        self._head = (
            f"POST {address.path.rstrip('/')}/api/v1/ingest HTTP/1.1\r\nHost: {address.netloc.rpartition('@')[2]}\r\n"
            f"Content-Type: application/x-msgpack\r\nAccept: application/json\r\nUser-Agent: perfagent\r\n{key}"
        )
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def post(self, body: bytes) -> Answer:
        if self._streams is None:
            self._streams = await asyncio.open_connection(self._host, self._port, ssl=self._tls)
        reader, writer = self._streams
        sent, encoding = packed(body, loopback=self._loopback)
        coding = f"Content-Encoding: {encoding}\r\n" if encoding else ""
        writer.write(f"{self._head}{coding}Content-Length: {len(sent)}\r\n\r\n".encode() + sent)
        status, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = dict(_headers(lines))
        found = await reader.readexactly(int(headers.get("content-length", "0")))
        if headers.get("connection", "").lower() == "close":
            self.close()
        return judge(Reply(int(status.split()[1]), headers, found))

    def close(self) -> None:
        streams, self._streams = self._streams, None
        if streams is not None:
            with contextlib.suppress(OSError):
                streams[1].close()


def _headers(lines: list[str]) -> Iterator[tuple[str, str]]:
    for line in lines:
        name, colon, value = line.partition(":")
        if colon:
            yield name.strip().lower(), value.strip()
