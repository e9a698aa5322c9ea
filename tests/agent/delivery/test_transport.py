from __future__ import annotations

import contextlib
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import trustme
from clocks import SteppedClock
from ingest_server import IngestServer, Scripted
from listening import OURS, answering

from perfagent.delivery.transport import DEADLINE_S, HttpTransport, judge
from perfagent.errors import ServerUnreachable
from perfagent.wire import Frame, encode

pytestmark = [pytest.mark.fault, pytest.mark.real]

Client = Callable[..., HttpTransport]
ACKED = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(OURS), OURS)
PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
ELSEWHERE = "http://monitor.invalid:8420"


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    """Makes transports and closes them in the end; no proxy of the machine is in the way."""
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    made: list[HttpTransport] = []

    def make(*arguments: Any, **more: Any) -> HttpTransport:
        made.append(HttpTransport(*arguments, **more))
        return made[-1]

    yield make
    for transport in made:
        transport.close()


def body(seq: int = 1) -> bytes:
    return encode(Frame(project="p", run="r", source="s", attempt=1, rank=0, seq=seq))


def test_frames_travel_over_one_kept_connection_with_the_key(client: Client) -> None:
    with IngestServer() as server:
        transport = client(server.url, "pfa_ingest_key\n")
        for seq in range(5):
            assert judge(transport.post(body(seq))).kind == "acked"
        assert server.connections == 1
        client(server.url).post(body())
    assert {h["content-type"] for h in server.headers} == {"application/x-msgpack"}
    assert [h.get("authorization") for h in server.headers] == ["Bearer pfa_ingest_key"] * 5 + [None]


def test_key_that_cannot_be_sent_is_never_told(client: Client) -> None:
    with IngestServer() as server, pytest.raises(ServerUnreachable, match=r"\[key\]") as raised:
        client(server.url, "pfa_ingest\nkey").post(body())
    assert "pfa_ingest" not in str(raised.value)


def test_connection_that_was_closed_while_idle_is_replaced_once(client: Client) -> None:
    with IngestServer() as server:
        transport = client(server.url)
        transport.post(body(1))
        server.script = [Scripted(cut=True)]
        assert judge(transport.post(body(2))).kind == "acked"
        server.script = [Scripted(cut=True)] * 2
        with pytest.raises(ServerUnreachable):
            transport.post(body(3))
    assert [frame.seq for frame in server.frames] == [1, 2, 2, 3, 3]


# ---- A03: deadlines


def drips(connection: socket.socket, head: bytes, drop: bytes) -> None:
    connection.recv(65536)
    connection.sendall(head)
    for _ in range(200):
        time.sleep(0.02)
        connection.sendall(drop)


OPENING = b"HTTP/1.1 200 OK\r\n"
SLOW: dict[str, Callable[[socket.socket], object]] = {
    "says nothing": lambda connection: [*iter(lambda: connection.recv(65536), b"")],
    "headers never end": lambda connection: drips(connection, OPENING, b"X-Fi"),
    "a byte now and then": lambda connection: drips(connection, OPENING + b"Content-Length: 999\r\n\r\n", b"x"),
}


@pytest.mark.parametrize(("answer", "behind"), [*((answer, "") for answer in SLOW), ("headers never end", "a proxy")])
def test_a03_slow_answer_ends_at_the_deadline(client, monkeypatch, answer, behind):
    """The clock goes on by a second at each look; while it waits for the answer, others have their turn."""
    clock, calls = SteppedClock(1.0), []
    with answering(SLOW[answer]) as there:
        if behind:
            monkeypatch.setenv("https_proxy", f"http://{there}")
        url = "https://monitor.invalid:8420" if behind else f"http://{there}"
        transport = client(url, idle=lambda: calls.append(clock.now), clock=clock.monotonic)
        with pytest.raises(ServerUnreachable):
            transport.post(body())
        transport.close()
    assert DEADLINE_S <= clock.now <= DEADLINE_S + 4 == 14.0
    assert len(calls) >= 2 or answer != "says nothing"


# ---- A04, A10: answers that are none


def test_a10_redirect_is_not_followed(client: Client) -> None:
    with IngestServer() as elsewhere:
        with IngestServer(Scripted(status=307, headers={"Location": elsewhere.url + "/api/v1/ingest"})) as server:
            assert judge(client(server.url).post(body())).kind == "foreign"
        assert elsewhere.frames == []


# ---- A24: addresses, proxies, TLS


def test_a24_proxy_of_the_environment_carries_the_frame(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    with IngestServer() as proxy:
        monkeypatch.setenv("http_proxy", f"http://user:word@127.0.0.1:{proxy.port}")
        assert judge(client(ELSEWHERE).post(body())).kind == "acked"
    assert proxy.headers[0]["host"] == "monitor.invalid:8420"
    assert proxy.headers[0]["proxy-authorization"] == "Basic dXNlcjp3b3Jk"


NO_PROXIES = (
    ("http://user:hun#ter2@proxy:3128", "no usable port"),
    ("http://user:hunter2@127.0.0.1:9", "the proxy 127.0.0.1:9$"),
)


@pytest.mark.parametrize(("proxy", "told"), NO_PROXIES)
def test_proxy_that_cannot_be_asked_is_told_without_its_password(client, monkeypatch, proxy, told):
    monkeypatch.setenv("http_proxy", proxy)
    with pytest.raises(ServerUnreachable, match=told) as raised:
        client(ELSEWHERE).post(body())
    assert "hun" not in str(raised.value)


def test_a24_proxy_to_an_https_server_gets_neither_key_nor_frame(client, monkeypatch):
    asked: list[bytes] = []

    def answer(connection: socket.socket) -> None:
        asked.append(connection.recv(65536))
        connection.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
        asked.append(connection.recv(65536))

    with answering(answer) as there:
        monkeypatch.setenv("https_proxy", f"http://user:word@{there}")
        with pytest.raises(ServerUnreachable, match="through the proxy"):
            client("https://monitor.invalid:8420", "pfa_ingest_key").post(body())
    head, hello = asked
    assert head.startswith(b"CONNECT monitor.invalid:8420 HTTP/1.")
    assert b"Proxy-Authorization: Basic dXNlcjp3b3Jk" in head
    assert b"pfa_" not in head
    assert hello[0] == 22, "what goes through the tunnel is no TLS handshake"


@pytest.mark.parametrize(
    ("name", "trusted", "ends"),
    [("localhost", True, "acked"), ("localhost", False, "CERT"), ("other.example", True, "CERT")],
)
def test_https_certificate_and_name_are_verified(client, monkeypatch, name, trusted, ends):
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(name).configure_cert(context)

    def answer(connection: socket.socket) -> None:
        with context.wrap_socket(connection, server_side=True) as secure:
            asked = b""
            while not asked.endswith(body()):
                asked += secure.recv(65536)
            secure.sendall(ACKED)

    with contextlib.ExitStack() as stack:
        if trusted:
            monkeypatch.setenv("SSL_CERT_FILE", stack.enter_context(authority.cert_pem.tempfile()))
        there = stack.enter_context(answering(answer))
        transport = client(f"https://localhost:{there.rpartition(':')[2]}")
        with contextlib.nullcontext() if ends == "acked" else pytest.raises(ServerUnreachable, match=ends):
            assert judge(transport.post(body(), deadline_s=10.0)).kind == ends
