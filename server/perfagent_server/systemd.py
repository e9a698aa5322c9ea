"""Tells systemd that the server is ready, that it is well, and that it stops (sd_notify(3)). Elsewhere it tells nobody."""

from __future__ import annotations

import contextlib
import os
import socket

__all__ = ["notify", "watchdog_period_s"]


def notify(message: str) -> None:
    """message: such as READY=1. What cannot be sent is dropped: it must not cost the server anything."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address.startswith("@"):  # a name without a file
        address = f"\0{address[1:]}"
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
        sender.settimeout(1.0)
        sender.sendto(message.encode(), address)


def watchdog_period_s() -> float | None:
    """How often systemd wants to hear WATCHDOG=1, half of its patience; None where it does not ask."""
    limit, process = os.environ.get("WATCHDOG_USEC", ""), os.environ.get("WATCHDOG_PID", "")
    if not limit.isdigit() or process not in ("", str(os.getpid())):
        return None
    return int(limit) / 2e6
