"""A forked child has nothing of a connection, at whatever moment the fork came."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from perfagent.delivery import fork_safe_sockets
from perfagent.delivery.fork_safe_sockets import Dialer

pytestmark = pytest.mark.real


def sockets() -> set[str]:
    names = set()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the one that lists them is closed again
            names.add(str(link.readlink()))
    return {name for name in names if name.startswith("socket:")}


def kept_by_a_child(before: set[str]) -> int:
    """How many sockets a child has that this process had not before; 99 when it fails or hangs."""
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            code = len(sockets() - before)
        finally:
            os._exit(code)
    until = time.monotonic() + 10
    while time.monotonic() < until:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.001)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    return 99


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """Takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


@pytest.mark.parametrize("hangs", [False, True])
def test_fork_while_a_socket_is_being_made(
    monkeypatch: pytest.MonkeyPatch, listener: socket.socket, hangs: bool
) -> None:
    """It waits until the socket is known, and not for long where that hangs."""
    made, release, real = threading.Event(), threading.Event(), socket.socket

    class Slow(real):  # type: ignore[misc, valid-type]
        def __init__(self, *arguments: Any, **more: Any) -> None:
            super().__init__(*arguments, **more)  # the descriptor is there, and nobody knows of it
            if threading.current_thread() is thread:
                made.set()
                release.wait(20.0 if hangs else 0.02)

    before, dialer, opened = sockets(), Dialer(), []
    holder = [dialer.forked]  # what the sender registers for its transport
    os.register_at_fork(after_in_child=lambda: holder[0]())
    thread = threading.Thread(target=lambda: opened.append(dialer.connect(listener.getsockname(), 5.0)))
    monkeypatch.setattr(socket, "socket", Slow)
    if not hangs:
        monkeypatch.setattr(fork_safe_sockets, "_WAIT_S", 20.0)  # the thread that makes it may be late
    thread.start()
    assert made.wait(5)
    assert kept_by_a_child(before) == (1 if hangs else 0)
    assert release.is_set() is False
    release.set()
    thread.join()
    assert opened[0].fileno() >= 0  # the parent's is as it was
    opened[0].close()
    dialer.connect(listener.getsockname(), 5.0).close()  # a fork gives back nothing that it never had
