"""A forked child has nothing of a connection, at whatever moment the fork came."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from perfagent.delivery import fork_safe_sockets
from perfagent.delivery.fork_safe_sockets import Dialer
from perfagent.delivery.transport import HttpTransport
from perfagent.errors import ServerUnreachable


def inodes_of_sockets() -> set[str]:
    names = set()
    for link in Path("/proc/self/fd").iterdir():
        try:
            names.add(str(link.readlink()))
        except OSError:  # the one that lists them is closed again
            continue
    return {name for name in names if name.startswith("socket:")}


def kept_by_a_child(before: set[str]) -> int:
    """How many sockets a child has that this process had not before; 99 when it fails or hangs."""
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            code = len(inodes_of_sockets() - before)
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
def listener() -> Any:
    """Takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


def forgetting(forked: Any) -> None:
    """What the sender registers for its transport; a method of a test's own object would be kept for good."""
    holder = [forked]
    os.register_at_fork(after_in_child=lambda: holder[0]())


def test_a_socket_that_is_being_made_while_another_thread_forks(monkeypatch, listener):
    made = threading.Event()

    def slow(*arguments: Any) -> socket.socket:
        found = socket.socket(*arguments)  # the descriptor is there, and nobody knows of it
        made.set()
        time.sleep(0.02)
        return found

    before = inodes_of_sockets()
    dialer = Dialer()
    forgetting(dialer.forked)
    monkeypatch.setattr(fork_safe_sockets, "socket", _With(slow))
    monkeypatch.setattr(fork_safe_sockets, "_WAIT_S", 20.0)  # the thread that makes it may be late
    opened: list[socket.socket] = []
    thread = threading.Thread(target=lambda: opened.append(dialer.connect(listener.getsockname(), 5.0)))
    thread.start()
    assert made.wait(5)
    assert kept_by_a_child(before) == 0
    thread.join()
    assert opened[0].fileno() >= 0  # the parent's is as it was
    opened[0].close()


class _With:
    """The module `socket` with another class of sockets."""

    def __init__(self, made_by: Any) -> None:
        self._made_by = made_by

    def __getattr__(self, name: str) -> Any:
        return self._made_by if name == "socket" else getattr(socket, name)


def test_a_tls_handshake_that_is_under_way(listener: socket.socket) -> None:
    before = inodes_of_sockets()
    transport = HttpTransport(f"https://127.0.0.1:{listener.getsockname()[1]}")
    transport._context = ssl.create_default_context()
    forgetting(transport.abandon)

    def post() -> None:
        with pytest.raises(ServerUnreachable):
            transport.post(b"", deadline_s=30.0)  # the other side ends it

    thread = threading.Thread(target=post)
    thread.start()
    accepted, _ = listener.accept()
    assert accepted.recv(1)  # the client's hello: its socket is wrapped
    here = before | {f"socket:[{os.fstat(accepted.fileno()).st_ino}]"}
    assert inodes_of_sockets() - here
    assert kept_by_a_child(here) == 0
    accepted.close()
    thread.join()


def test_a_descriptor_that_belongs_to_somebody_else_by_now_stays_open(listener: socket.socket) -> None:
    dialer = Dialer()
    mine = dialer.connect(listener.getsockname(), 5.0)
    number = mine.fileno()
    mine.close()
    other = socket.socket()
    try:
        if other.fileno() != number:
            os.dup2(other.fileno(), number)
        dialer.forked()
        assert os.fstat(number)
    finally:
        other.close()
        if other.fileno() != number:
            with contextlib.suppress(OSError):
                os.close(number)


def test_a_fork_does_not_wait_for_long() -> None:
    with fork_safe_sockets._gate.lock:  # as if a thread hung there
        begin = time.monotonic()
        assert kept_by_a_child(inodes_of_sockets()) == 0
        assert time.monotonic() - begin < 5
    with fork_safe_sockets._gate.lock:  # it was not given back by a fork that never had it
        pass
