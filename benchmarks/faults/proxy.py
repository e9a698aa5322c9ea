"""A TCP proxy that cuts, delays, repeats and reorders by a seeded schedule: what may lie between an agent and its
server.

One fault per connection. "request": RST after some bytes of the request · "response": RST after some bytes of the
answer, which the server gave · "half_request": the sending side is closed in the middle of the request ·
"half_response": the answering side is closed in the middle of the answer · "late": RST at once, and the request reaches
the server after later ones · "twice": the request is delivered a second time · "slow": the answer comes in pieces ·
"none".
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import threading
from collections import Counter
from types import TracebackType

CUTS = ("request", "response", "half_request", "half_response", "late")
FAULTS = (*CUTS, "twice", "slow", "none")


class Proxy:
    """`with Proxy(port, seed=4) as proxy:` listens on proxy.url. done: faults so far, by kind. calm: no faults from now
    on."""

    def __init__(self, server_port: int, *, seed: int) -> None:
        self._server_port, self._random = server_port, random.Random(seed)
        self.done: Counter[str] = Counter()
        self.calm = False
        self._late: list[bytes] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def cuts(self) -> int:
        return sum(self.done[kind] for kind in CUTS)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, ValueError):
                while await self._one(reader, writer):
                    pass
        except asyncio.CancelledError:
            pass
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One request with its fault; False when the connection is over."""
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:"))
        request = head + await reader.readexactly(length)
        kind = "none" if self.calm else self._random.choice(FAULTS)
        self.done[kind] += 1
        if kind in ("request", "half_request"):
            await self._send_part(request, reset=kind == "request")
            _reset(writer)
            return False
        if kind == "late":
            self._late.append(request)
            _reset(writer)
            return False
        answer = await self._ask(request)
        if kind == "twice":
            await self._ask(request)
        while self._late and (self.calm or self._random.random() < 0.5):
            await self._ask(self._late.pop(0))
        if kind == "response":
            writer.write(answer[: self._random.randrange(len(answer))])
            _reset(writer)
            return False
        if kind == "half_response":
            writer.write(answer[: self._random.randrange(len(answer))])
            writer.write_eof()
            await reader.read(1)
            return False
        for piece in (answer[i : i + 40] for i in range(0, len(answer), 40)) if kind == "slow" else (answer,):
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        return True

    async def _ask(self, request: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._server_port)
        try:
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:"))
            return head + await reader.readexactly(length)
        finally:
            writer.close()

    async def _send_part(self, request: bytes, *, reset: bool) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", self._server_port)
        writer.write(request[: self._random.randrange(len(request))])
        await writer.drain()
        if reset:
            _reset(writer)
        else:
            writer.write_eof()
            writer.close()

    def __enter__(self) -> Proxy:
        self._thread.start()
        started = asyncio.run_coroutine_threadsafe(asyncio.start_server(self._serve, "127.0.0.1", 0), self._loop)
        self._server = started.result(10)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        async def end() -> None:
            self._server.close()
            for task in [*self._tasks]:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()


def _reset(writer: asyncio.StreamWriter) -> None:
    """Ends a connection with RST instead of FIN."""
    sock = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
