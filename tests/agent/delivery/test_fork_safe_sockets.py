"""A forked child has nothing of a connection."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from pathlib import Path

import pytest

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


def test_forked_child_keeps_no_connection() -> None:
    before, dialer = sockets(), Dialer()
    holder = [dialer.forked]  # what the sender registers for its transport
    os.register_at_fork(after_in_child=lambda: holder[0]())
    with socket.create_server(("127.0.0.1", 0)) as listening, dialer.connect(listening.getsockname(), 5.0) as opened:
        assert kept_by_a_child(before) == 1, "the listening one"
        assert dialer.is_ours
        opened.sendall(b"x")  # the parent's is as it was
