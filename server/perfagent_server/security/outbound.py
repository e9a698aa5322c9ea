"""Sends requests to addresses that people choose: it resolves, checks and connects to that very address. Nothing else
may.

A webhook's URL is somebody's input, and the server stands inside the network (SSRF). Checking a name and then handing
the name to an HTTP library resolves it twice, and the second answer may differ (rebinding): here the socket is opened
to the address that was checked. There are no redirects, proxies from the environment or Unix sockets, and a request
ends after its total time, however slowly the other side drips.
"""

from __future__ import annotations

import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any
from urllib.parse import urlsplit

import httpcore
import httpx

from perfagent.errors import ConfigError, PerfagentError

__all__ = ["AddressNotAllowed", "Guard", "Reply", "is_public", "post"]

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolver = Callable[[str, int], Sequence[str]]

TOTAL_S = 10.0
_KEPT_HEADERS = ("retry-after", "location")
# is_global alone is no guard: it holds for NAT64 and 6to4 forms of loopback and for multicast, and what it says of the
# special ranges differs between versions of Python. The rest is cloud metadata under a public address (Azure), a
# deprecated relay prefix, and site-local.
_NEVER = tuple(
    ipaddress.ip_network(text)
    for text in (
        "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "168.63.129.16/32", "169.254.0.0/16", "172.16.0.0/12",
        "192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24",
        "224.0.0.0/3", "::/96", "64:ff9b:1::/48", "100::/64", "100:0:0:1::/64", "2001::/23", "2001:db8::/32", "3fff::/20",
        "5f00::/16", "fc00::/7", "fe80::/10", "fec0::/10", "ff00::/8",
    )
)  # fmt: skip
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


class AddressNotAllowed(PerfagentError):  # noqa: N818 - says what is so, and is what the message begins with
    """A receiver lies where the server must not send to."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What came back. Only the head is read: nobody can feed us a body."""

    status: int
    headers: dict[str, str]


def is_public(address: Address) -> bool:
    """Whether an address is on the public internet, in whatever form it is written."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if inner is None and address in _NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(inner)
    if any(address.version == network.version and address in network for network in _NEVER):
        return False
    return address.is_global and not (address.is_multicast or address.is_reserved or address.is_unspecified)


@dataclass(frozen=True, slots=True)
class _Entry:
    """One entry of the allow-list: a network or a name, for one port or for all."""

    network: ipaddress.IPv4Network | ipaddress.IPv6Network | None
    name: str
    port: int | None

    def holds(self, host: str, address: Address, port: int) -> bool:
        if self.port is not None and self.port != port:
            return False
        if self.network is not None:
            return address.version == self.network.version and address in self.network
        return self.name == host or (self.name == "localhost" and address.is_loopback)


class Guard:
    """allow: receivers that may be used although they are loopback or private: host, host:port, address or CIDR."""

    def __init__(self, allow: Iterable[str] = (), *, resolver: Resolver | None = None) -> None:
        self._allow = tuple(_parse(text) for text in allow if text.strip())
        self._resolve = resolver or _resolve

    def check_url(self, url: str) -> None:
        """Raises ConfigError for a URL that can be no receiver, AddressNotAllowed for one that must be none. A name
        that does not resolve now may do so later, and passes."""
        _, host, port, _ = _split(url)
        try:
            self.addresses(host, port)
        except OSError:
            return

    def addresses(self, host: str, port: int) -> list[str]:
        """The addresses of a host that may be connected to. Raises AddressNotAllowed, or OSError when there is none."""
        found = self._parsed(host, port)
        allowed = self._listed(found, host, port)
        if allowed:
            return allowed
        # One inner address among public ones is enough to refuse: which of them is taken would be the other side's
        # choice.
        refused = [text for text, address in found if not is_public(address)]
        if refused:
            named = refused[0] if host == refused[0] else f"{host} ({refused[0]})"
            place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            raise AddressNotAllowed(
                f"address not allowed: {named} is not on the public internet; to send there all the same, start the server with "
                f"PERFAGENT_WEBHOOK_ALLOW={place}"
            )
        return [text for text, _ in found]

    def listed_addresses(self, host: str, port: int) -> list[str]:
        """The addresses of a host that the allow-list names, public or not. Raises OSError when the host has none."""
        return self._listed(self._parsed(host, port), host, port)

    def _parsed(self, host: str, port: int) -> list[tuple[str, Address]]:
        found = list(self._resolve(host, port))
        if not found:
            raise OSError(f"{host} has no address")
        return [(text, ipaddress.ip_address(text.partition("%")[0])) for text in found]

    def _listed(self, found: list[tuple[str, Address]], host: str, port: int) -> list[str]:
        name = host.lower().rstrip(".")
        return [
            text for text, address in found if any(entry.holds(name, _inner(address), port) for entry in self._allow)
        ]


def post(guard: Guard, url: str, body: bytes, headers: dict[str, str], *, total_s: float = TOTAL_S) -> Reply:
    """One POST. Raises AddressNotAllowed, ConfigError, OSError or httpcore's errors (timeouts, broken answers)."""
    scheme, host, port, target = _split(url)
    deadline = time.monotonic() + total_s
    backend = _Backend(guard, host, deadline)
    netloc = f"[{host}]" if ":" in host else host
    standard = {"http": 80, "https": 443}[scheme]
    sent = {"Host": netloc if port == standard else f"{netloc}:{port}", "Connection": "close", **headers}
    timeout = dict.fromkeys(("connect", "read", "write", "pool"), total_s)
    origin = httpcore.URL(scheme=scheme.encode(), host=host.encode(), port=port, target=target.encode())
    with (
        httpcore.ConnectionPool(
            ssl_context=_tls() if scheme == "https" else None, network_backend=backend, retries=0
        ) as pool,
        pool.stream(
            "POST", origin, headers=list(sent.items()), content=body, extensions={"timeout": timeout}
        ) as response,
    ):
        found = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in response.headers}
        return Reply(response.status, {name: found[name][:300] for name in _KEPT_HEADERS if name in found})


class _Backend(httpcore.NetworkBackend):
    """Connects to what the guard allows, and to nothing else."""

    def __init__(self, guard: Guard, host: str, deadline: float) -> None:
        self._guard, self._host, self._deadline = guard, host, deadline
        self._real = httpcore.SyncBackend()

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Any = None,
    ) -> httpcore.NetworkStream:
        addresses = _within(self._deadline, lambda: self._guard.addresses(self._host, port))
        error: Exception | None = None
        for address in addresses:
            try:
                stream = self._real.connect_tcp(
                    address, port, _left(self._deadline, timeout), local_address, socket_options
                )
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as failure:
                error = failure
                continue
            return _Stream(stream, self._deadline)
        raise error or OSError(f"{host} has no address")

    def connect_unix_socket(
        self,
        path: str,
        timeout: float | None = None,  # noqa: ARG002
        socket_options: Any = None,  # noqa: ARG002
    ) -> httpcore.NetworkStream:
        raise AddressNotAllowed(
            f"address not allowed: the Unix socket {path!r}; webhooks go to http and https addresses only"
        )

    def sleep(self, seconds: float) -> None:
        time.sleep(min(seconds, max(0.0, self._deadline - time.monotonic())))


class _Stream(httpcore.NetworkStream):
    """A stream that ends at its deadline: timeouts of single reads would let one byte a second go on for ever."""

    def __init__(self, stream: httpcore.NetworkStream, deadline: float) -> None:
        self._stream, self._deadline = stream, deadline

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._stream.read(max_bytes, _left(self._deadline, timeout))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._stream.write(buffer, _left(self._deadline, timeout))

    def close(self) -> None:
        self._stream.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        return _Stream(
            self._stream.start_tls(ssl_context, server_hostname, _left(self._deadline, timeout)), self._deadline
        )

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


@cache
def _tls() -> ssl.SSLContext:
    context = httpcore.default_ssl_context()
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def _left(deadline: float, timeout: float | None) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise httpcore.ReadTimeout("the receiver took longer than the total time of a delivery")
    return left if timeout is None else min(left, timeout)


def _within(deadline: float, call: Callable[[], list[str]]) -> list[str]:
    """The result of a call that cannot be interrupted (getaddrinfo), or a timeout."""
    outcome: list[list[str] | Exception] = []

    def run() -> None:
        try:
            outcome.append(call())
        except Exception as error:  # noqa: BLE001 - handed to the caller's thread
            outcome.append(error)

    thread = threading.Thread(target=run, name="perfagent-resolve", daemon=True)
    thread.start()
    thread.join(_left(deadline, None))
    if not outcome:
        raise httpcore.ConnectTimeout("the receiver's name took too long to resolve")
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    return outcome[0]


def _resolve(host: str, port: int) -> list[str]:
    """Addresses of a name, or of any way to write an address that the system's resolver understands (127.1,
    0x7f000001)."""
    rows = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(row[4][0]) for row in rows))


def _inner(address: Address) -> Address:
    """127.0.0.1 of ::ffff:127.0.0.1: an allow-list names the former."""
    return (address.ipv4_mapped or address) if isinstance(address, ipaddress.IPv6Address) else address


def _split(url: str) -> tuple[str, str, int, str]:
    """scheme, host, port, target, all of them ASCII: the name that is resolved is the one of the Host header, of the
    certificate and of the allow-list. Raises ConfigError."""
    if any(ord(character) < 33 or ord(character) == 127 for character in url) or "\\" in url:
        raise ConfigError("a webhook's URL holds spaces, control characters or backslashes; percent-encode them")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"{url[:200]!r} is no URL: {error}") from None
    if parts.scheme not in ("http", "https"):
        given = f"not with {parts.scheme[:20]!r}"
        if not parts.scheme:
            given = f"as https://example.com/hook; {url[:200]!r} begins with neither"
        raise ConfigError(f"a webhook's URL begins with http:// or https://, {given}")
    if parts.username is not None or parts.password is not None:
        raise ConfigError("a webhook's URL must not hold a user or a password; receivers check the signature instead")
    host = parts.hostname or ""
    if not host or port == 0:
        raise ConfigError(f"{url[:200]!r} names no host to send to")
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    if not target.isascii():
        raise ConfigError("a webhook's path must be ASCII; percent-encode the rest")
    return parts.scheme, _ascii_name(host), port or (443 if parts.scheme == "https" else 80), target


def _ascii_name(host: str) -> str:
    """A host as the network spells it: müller.example is xn--mller-kva.example. Raises ConfigError.

    By IDNA 2008, as browsers do: Python's own codec is of 2003 and would send what is meant for straße.example to
    strasse.example. It also says what is no name (empty or too long labels), where the resolver would raise a
    UnicodeError."""
    if ":" in host:
        return host  # an IPv6 address
    try:
        name = host if host.isascii() else httpx.URL(f"http://{host}/").raw_host.decode("ascii")
    except httpx.InvalidURL:
        raise ConfigError(f"{host[:200]!r} is no host name: it holds characters that names may not have") from None
    labels = name.removesuffix(".").split(".")
    if len(name) > 254 or not all(0 < len(label) < 64 for label in labels):
        raise ConfigError(
            f"{host[:200]!r} is no host name: between its dots there are 1 to 63 characters, and 253 in all"
        )
    return name


def _parse(text: str) -> _Entry:
    """An entry of the allow-list. Raises ConfigError."""
    text = text.strip()
    try:
        return _Entry(ipaddress.ip_network(text, strict=False), "", None)
    except ValueError:
        pass
    name, separator, number = text.rpartition(":")
    if not separator:
        name, number = text, ""
    allowed = f"PERFAGENT_WEBHOOK_ALLOW has {text!r}; entries are host, host:port, an address or a CIDR"
    if separator and not (number.isascii() and number.isdecimal() and 0 < int(number) < 65536):
        raise ConfigError(allowed)
    port = int(number) if number else None
    name = name.removeprefix("[").removesuffix("]").lower().rstrip(".")
    try:
        return _Entry(ipaddress.ip_network(name), "", port)
    except ValueError:
        pass
    try:
        return _Entry(None, _ascii_name(name), port)
    except ConfigError as error:
        raise ConfigError(f"{allowed} ({error})") from None
