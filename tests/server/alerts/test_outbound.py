"""The guard against server-side request forgery: nothing inside is reached, in whatever form it is written."""

from __future__ import annotations

import ipaddress
import threading
import time
from collections.abc import Callable

import httpcore
import pytest
from builders import Receiver
from listening import answering

from perfagent.errors import ConfigError
from perfagent_server.security.outbound import AddressNotAllowed, Guard, _Backend, is_public, post

INSIDE = [
    "127.0.0.1", "127.1", "127.0.1", "2130706433", "0x7f000001", "0177.0.0.1", "0x7f.1", "127.255.255.254", "0.0.0.0", "0",
    "localhost", "LOCALHOST", "localhost.",
    "10.0.0.1", "10.255.255.255", "172.16.0.1", "172.31.255.255", "192.168.1.1", "100.64.0.1", "100.100.100.200",
    "169.254.169.254", "169.254.0.1", "2852039166", "0xa9fea9fe", "168.63.129.16", "192.0.0.192", "198.18.0.1", "192.0.2.1",
    "224.0.0.1", "239.255.255.250", "255.255.255.255", "240.0.0.1", "192.88.99.1",
    "[::1]", "[::]", "[::ffff:127.0.0.1]", "[::ffff:10.0.0.1]", "[::127.0.0.1]", "[::ffff:a9fe:a9fe]",
    "[64:ff9b::7f00:1]", "[64:ff9b::a00:1]", "[64:ff9b:1::1]", "[2002:7f00:1::]", "[2002:a9fe:a9fe::1]", "[2001:0:7f00:1::]",
    "[fe80::1]", "[fec0::1]", "[fc00::1]", "[fd00:ec2::254]", "[ff02::1]", "[2001:db8::1]", "[100::1]",
]  # fmt: skip
PUBLIC = ["93.184.216.34", "8.8.8.8", "2606:2800:220:1::1", "64:ff9b::808:808", "2002:808:808::1", "::ffff:8.8.8.8"]
NO_RECEIVERS = [
    "file:///etc/passwd", "ftp://example.org/", "gopher://example.org/", "unix:///var/run/docker.sock", "http+unix://%2Fvar%2Frun/x",
    "http://", "http:///x", "//example.org/x", "http://user:secret@example.org/", "http://example.org:0/", "http://example.org:99999/",
    "http://example.org/a b", "http://example.org/\r\nHost: inner", "http:\\\\127.0.0.1\\x", "javascript:alert(1)", "",
]  # fmt: skip
NO_NAMES = [
    "a..b",
    "..",
    ".example",
    "a" * 64 + ".example",
    "ab." * 90 + "example",
    "\u200b",
    "\u200b.example",
    "xn--é.example",
]


def resolving(*addresses: str, asked: list[str] | None = None) -> Callable[[str, int], list[str]]:
    """A resolver with the same answer for every name."""
    return lambda host, _port: (asked.append(host) if asked is not None else None) or list(addresses)  # type: ignore[func-returns-value]


@pytest.mark.fault
@pytest.mark.parametrize("host", INSIDE)
def test_x05_no_form_of_an_inner_address_is_sent_to(host: str) -> None:
    with pytest.raises((AddressNotAllowed, OSError)):
        post(Guard(), f"http://{host}:8420/x", b"{}", {}, total_s=30.0)  # a slow resolver takes its time for a name


@pytest.mark.parametrize("text", PUBLIC)
def test_public_addresses_pass(text: str) -> None:
    assert is_public(ipaddress.ip_address(text))
    assert Guard(resolver=resolving(text)).addresses("example.org", 443) == [text]


@pytest.mark.fault
@pytest.mark.parametrize("url", NO_RECEIVERS)
def test_x05_only_plain_http_and_https_urls_are_receivers(url: str) -> None:
    with pytest.raises(ConfigError):
        Guard(resolver=resolving("8.8.8.8")).check_url(url)


@pytest.mark.parametrize("host", NO_NAMES)
def test_what_is_no_host_name_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match="is no host name"):
        Guard().check_url(f"http://{host}/x")


@pytest.mark.fault
def test_x05_inner_address_is_refused_also_at_the_second_look() -> None:
    """A name that is public when it is checked and inner when it is connected to: the second answer is checked as well."""
    with pytest.raises(AddressNotAllowed):
        Guard(resolver=resolving("8.8.8.8", "127.0.0.1")).addresses("mixed.example", 80)
    answers = iter([["8.8.8.8"], ["127.0.0.1"]])
    guard = Guard(resolver=lambda host, port: next(answers))
    guard.check_url("http://rebind.example/x")
    with pytest.raises(AddressNotAllowed):
        post(guard, "http://rebind.example/x", b"{}", {})


@pytest.mark.real
@pytest.mark.parametrize(
    ("name", "ascii_name"),
    [
        ("hook.example", "hook.example"),
        ("hooks.müller.example", "hooks.xn--mller-kva.example"),
        ("straße.example", "xn--strae-oqa.example"),
    ],
)
def test_the_socket_goes_to_the_address_that_was_checked(receiver: Receiver, name: str, ascii_name: str) -> None:
    """The resolver is asked once: there is no second answer that could differ."""
    asked: list[str] = []
    port = receiver.address.rpartition(":")[2]
    guard = Guard([f"{name}:{port}"], resolver=resolving("127.0.0.1", asked=asked))
    assert post(guard, f"http://{name}:{port}/x", b"{}", {}).status == 200
    assert asked == [ascii_name]
    assert receiver.deliveries[0].headers["host"] == f"{ascii_name}:{port}"


@pytest.mark.real
@pytest.mark.fault
def test_x05_redirects_are_not_followed_and_no_proxy_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    with Receiver(lambda _: 302) as first:
        assert post(Guard([first.address]), first.url, b"{}", {}).status == 302
        assert len(first.deliveries) == 1


@pytest.mark.fault
def test_x05_a_unix_socket_is_never_opened() -> None:
    backend = _Backend(Guard(["0.0.0.0/0"]), "x", time.monotonic() + 1)
    with pytest.raises(AddressNotAllowed):
        backend.connect_unix_socket("/var/run/docker.sock")


@pytest.mark.parametrize(
    ("entry", "allowed"),
    [
        ("127.0.0.1:9000", True), ("127.0.0.1", True), ("127.0.0.0/8", True), ("localhost:9000", True), ("localhost", True),
        ("127.0.0.1:1", False), ("10.0.0.0/8", False), ("example.org", False), ("[::1]:9000", False),
    ],
)  # fmt: skip
def test_the_allow_list_takes_hosts_ports_and_cidrs(entry: str, allowed: bool) -> None:
    host = "localhost" if entry.startswith("localhost") else "127.0.0.1"
    guard = Guard([entry], resolver=resolving("127.0.0.1", "192.168.1.1"))
    if allowed:
        by_name = ["192.168.1.1"] if host == "localhost" else []  # else an address does not allow its neighbors
        assert guard.addresses(host, 9000) == ["127.0.0.1", *by_name]
    else:
        with pytest.raises(AddressNotAllowed):
            guard.check_url(f"http://{host}:9000/x")


@pytest.mark.parametrize("entry", ["host:port", "a:b:c", "host:0", "host:70000", "host:²", "a..b:80"])
def test_a_malformed_allow_list_is_refused_at_start(entry: str) -> None:
    with pytest.raises(ConfigError, match="PERFAGENT_WEBHOOK_ALLOW"):
        Guard([entry])


@pytest.mark.real
def test_a_dripping_receiver_is_cut_off_after_the_total_time() -> None:
    stop = threading.Event()

    def drip(peer) -> None:  # type: ignore[no-untyped-def]
        for byte in b"HTTP/1.1 200 OK\r\nX: " + b"y" * 1000:
            if stop.wait(0.05):
                return
            peer.send(bytes([byte]))

    begun = time.monotonic()
    with answering(drip) as address, pytest.raises(httpcore.TimeoutException):
        post(Guard(["127.0.0.1"]), f"http://{address}/", b"{}", {}, total_s=0.5)
    assert time.monotonic() - begun < 15
    stop.set()


def test_a_resolver_that_hangs_is_cut_off() -> None:
    hang = threading.Event()
    with pytest.raises(httpcore.TimeoutException):
        post(Guard(resolver=lambda host, port: hang.wait(20) and []), "http://slow.example/", b"{}", {}, total_s=0.3)  # type: ignore[arg-type, return-value]
    hang.set()
