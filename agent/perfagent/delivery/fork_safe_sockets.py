"""Opens connections that a forked child can always close.

A child inherits every open descriptor. One that it keeps holds the connection open after the parent has closed it, so
the server goes on waiting. What was opened is known by descriptor and inode, whatever object wraps it by then (TLS makes
another one). In the process itself, too, nothing is written to a number that has become somebody else's.
"""

from __future__ import annotations

import contextlib
import encodings.idna  # noqa: F401 - getaddrinfo would import it on the courier's thread, where a fork may come in between
import socket
import time
from collections.abc import Callable
from typing import Any

from perfagent.process.descriptors import Descriptor, above_streams

__all__ = ["Dialer"]


class Dialer:
    """Opens one connection at a time. looked_up_s: how long the newest connection's name was looked up."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._newest: Descriptor | None = None
        self.looked_up_s = 0.0

    def connect(self, address: tuple[str, int], timeout: float, _source: object = None) -> socket.socket:
        """As socket.create_connection, with a timeout for all addresses together, and none for the look-up of the name:
        nobody can give that up, and behind a nameserver that is away (5 s) nothing would be left for any address.
        Raises OSError."""
        error: OSError | None = None
        begun = self._clock()
        try:
            found = _addresses(*address)
        finally:
            self.looked_up_s = self._clock() - begun
        until = self._clock() + timeout
        for tried, (family, kind, protocol, _name, target) in enumerate(found):
            sock = None
            try:  # a kernel without IPv6; an address that swallows everything leaves time for the others
                sock = self._socket(family, kind, protocol)
                sock.settimeout(max(0.001, (until - self._clock()) / (len(found) - tried)))
                sock.connect(target)
            except OSError as failed:
                error = failed
                if sock is not None:
                    sock.close()
            else:
                return sock
        raise error or OSError(f"no address found for {address[0]}")

    def _socket(self, family: int, kind: int, protocol: int) -> socket.socket:
        sock = socket.socket(family, kind, protocol)
        if sock.fileno() != (fd := above_streams(sock.fileno())):
            sock.detach()
            sock = socket.socket(family, kind, protocol, fileno=fd)
        self._newest = Descriptor(fd)
        return sock

    @property
    def is_ours(self) -> bool:
        """Whether the newest socket is still what its number means."""
        return self._newest is not None and self._newest.is_ours

    def forked(self) -> None:
        """In a forked child: closes what this process inherited of it, without a word to the other side."""
        newest, self._newest = self._newest, None
        with contextlib.suppress(OSError):
            if newest is not None:
                newest.close()


def _addresses(host: str, port: int) -> list[tuple[Any, ...]]:
    """As socket.getaddrinfo; an IP address is not looked up, since that opens sockets that nobody knows of."""
    for family, target in ((socket.AF_INET, (host, port)), (socket.AF_INET6, (host, port, 0, 0))):
        with contextlib.suppress(OSError):
            socket.inet_pton(family, host)
            return [(family, socket.SOCK_STREAM, 0, "", target)]
    return list(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
