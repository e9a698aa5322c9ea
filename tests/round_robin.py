"""A TCP proxy as people put in front of several servers: each connection goes to the next server that answers."""

from __future__ import annotations

import contextlib
import itertools
import select
import socket
import threading
from collections.abc import Sequence

__all__ = ["RoundRobin"]

_CHUNK = 1 << 16


class RoundRobin:
    """`with RoundRobin([port, port]) as proxy:` listens on `proxy.port`."""

    def __init__(self, ports: Sequence[int]) -> None:
        self._ports, self._next = list(ports), itertools.count()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._accept, daemon=True)

    def __enter__(self) -> RoundRobin:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._listening.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError):
            server = self._connected()
            if server is None:
                return
            with server:
                while True:
                    ready, _, _ = select.select([client, server], [], [])
                    for one in ready:
                        data = one.recv(_CHUNK)
                        if not data:
                            return
                        (server if one is client else client).sendall(data)

    def _connected(self) -> socket.socket | None:
        first = next(self._next)
        for at in range(len(self._ports)):
            with contextlib.suppress(OSError):
                return socket.create_connection(("127.0.0.1", self._ports[(first + at) % len(self._ports)]), timeout=30)
        return None
