"""A listener that does what a test says with each connection."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

__all__ = ["answering", "say"]

OURS = b'{"stored": 1, "duplicate": 0}'
"""As our server acknowledges."""


@contextlib.contextmanager
def answering(answer: Callable[[socket.socket], object], *, host: str = "127.0.0.1") -> Iterator[str]:
    """host:port of it. Each connection is closed after its answer."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection, contextlib.suppress(OSError):
                        answer(connection)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(10)


def say(connection: socket.socket, words: bytes) -> bytes:
    """An answer, after which everything that still comes is read: closed before, the connection would be reset. What was
    asked."""
    connection.settimeout(5.0)
    asked = connection.recv(65536)
    connection.sendall(words)
    connection.shutdown(socket.SHUT_WR)
    while connection.recv(65536):
        pass
    return asked
