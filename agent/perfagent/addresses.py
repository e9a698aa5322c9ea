"""Addresses of servers: the default one, and whether an address is on this machine."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

__all__ = ["DEFAULT_SERVER", "is_loopback", "is_on_this_machine"]

DEFAULT_SERVER = "http://127.0.0.1:8420"


def is_loopback(host: str | None) -> bool:
    """Whether a host, as `urlsplit(address).hostname` gives it, is this machine. `127.evil.example` is not."""
    try:
        return host == "localhost" or ipaddress.ip_address(host or "").is_loopback
    except ValueError:  # a name
        return False


def is_on_this_machine(address: str) -> bool:
    """Whether an http:// or https:// address leads to this machine. No proxy of the environment can reach it there."""
    try:
        return is_loopback(urlsplit(address).hostname)
    except ValueError:  # brackets that do not close
        return False
