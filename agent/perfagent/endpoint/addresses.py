"""Addresses of servers: the default one, whether one is on this machine, and https:// where plain HTTP is spoken."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

__all__ = ["DEFAULT_SERVER", "REFUSAL", "is_loopback", "is_on_this_machine", "refuses_plain_http", "wrong_scheme"]

DEFAULT_SERVER = "http://127.0.0.1:8420"
_NOT_TLS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE")
"""What OpenSSL calls an answer that is none of TLS."""
_TLS_ALERT = "\x15\x03"
"""How TLS answers a request that is none; http.client takes it for a status line."""
REFUSAL = ": what listens there speaks TLS, give its address with https://"


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


def wrong_scheme(address: str, error: Exception, *, hung_up: bool) -> str:
    """In words, when the error looks as if the scheme were the mistake; else "".

    address: as given. hung_up: whether the other side closed the connection instead of answering, and never answered
    before.
    """
    given, _, rest = address.partition("://")
    if given == "https" and any(reason in str(error) for reason in _NOT_TLS):
        return f"{address} was given, and what listens there does not speak TLS: give http://{rest}"
    if given == "http" and str(error).startswith(_TLS_ALERT):
        return f"{address} was given, and what listens there speaks TLS: give https://{rest}"
    if given == "http" and hung_up:
        return f"{address} was given, and what listens there hung up as servers that speak TLS do: if it does, give https://{rest}"
    return ""


def refuses_plain_http(body: bytes) -> bool:
    """Whether this is the page, in the words of nginx, Apache, Go and Caddy, that answers a request without TLS (status
    400)."""
    return b"HTTPS" in body[:4096]
