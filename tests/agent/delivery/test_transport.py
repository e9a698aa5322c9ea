from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from email.utils import formatdate
from typing import Any

import pytest
from builders import free_port
from ingest_server import IngestServer, Scripted
from stepped_clock import SteppedClock

from perfagent.delivery.transport import HttpTransport, Reply, judge, packed
from perfagent.errors import ServerUnreachable
from perfagent.wire import Frame, encode

Client = Callable[..., HttpTransport]


@pytest.fixture
def client() -> Iterator[Callable[..., HttpTransport]]:
    """Makes transports and closes them in the end."""
    made: list[HttpTransport] = []

    def make(*arguments: Any, **more: Any) -> HttpTransport:
        made.append(HttpTransport(*arguments, **more))
        return made[-1]

    yield make
    for transport in made:
        transport.close()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SteppedClock:
    """Of the transport; each look at it takes a tenth of a second."""
    clock = SteppedClock(0.1)
    for module in ("transport", "fork_safe_sockets"):
        monkeypatch.setattr(f"perfagent.delivery.{module}.time", clock)
    return clock


def body(seq: int = 1) -> bytes:
    return encode(Frame(project="p", run="r", source="s", attempt=1, rank=0, seq=seq))


def test_frames_travel_over_one_kept_connection_with_the_key(client: Client) -> None:
    with IngestServer() as server:
        transport = client(server.url, "pfa_ingest_key")
        for seq in range(5):
            assert judge(transport.post(body(seq))).kind == "acked"
        transport.close()
    assert server.connections == 1
    assert {h["authorization"] for h in server.headers} == {"Bearer pfa_ingest_key"}
    assert {h["content-type"] for h in server.headers} == {"application/x-msgpack"}


def test_without_a_key_no_authorization_is_sent(client: Client) -> None:
    with IngestServer() as server:
        client(server.url).post(body())
    assert "authorization" not in server.headers[0]


def test_a_key_with_a_line_break_behind_it_is_sent_without_and_never_told(client: Client) -> None:
    with IngestServer() as server:
        assert judge(client(server.url, "pfa_ingest_key\n").post(body())).kind == "acked"
    assert server.headers[0]["authorization"] == "Bearer pfa_ingest_key"
    with IngestServer() as server, pytest.raises(ServerUnreachable, match=r"\[key\]") as raised:
        client(server.url, "pfa_ingest\nkey").post(body())
    assert "pfa_ingest" not in str(raised.value)


def test_a_proxy_without_a_usable_port_is_told_without_its_password(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://user:hun#ter2@proxy:3128")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ServerUnreachable, match="no usable port") as raised:
        client("http://monitor.invalid:8420").post(body())
    assert "hun" not in str(raised.value)


def test_a_connection_that_the_server_closed_while_idle_is_replaced_at_once(client: Client) -> None:
    port = free_port()
    transport = client(f"http://127.0.0.1:{port}")
    for _ in range(3):
        with IngestServer(port=port) as server:
            assert judge(transport.post(body())).kind == "acked"
            assert transport._connection is not None
            transport._connection.sock.shutdown(socket.SHUT_WR)  # what a server's idle time-out looks like from here
        assert len(server.frames) == 1


def test_deflate_is_used_only_where_it_helps() -> None:
    zeros = bytes(10_000)
    assert packed(zeros, loopback=False)[1] == "deflate"
    assert packed(zeros, loopback=True) == (zeros, None)
    assert packed(bytes(2**21), loopback=True)[1] == "deflate"
    assert packed(b"x" * 100, loopback=False) == (b"x" * 100, None)


@pytest.mark.fault
def test_a01_a_closed_port_is_unreachable(client: Client) -> None:
    with pytest.raises(ServerUnreachable):
        client(f"http://127.0.0.1:{free_port()}").post(body())


@pytest.mark.fault
def test_a03_a_reply_of_a_byte_now_and_then_ends_at_the_deadline(client: Client, clock: SteppedClock) -> None:
    with IngestServer(Scripted(body=b"x" * 1000, slow_s=0.05)) as server:
        with pytest.raises(ServerUnreachable):
            client(server.url).post(body(), deadline_s=1.0)
        assert clock.now < 1.5


@pytest.mark.fault
def test_a03_a_server_that_accepts_and_says_nothing_ends_at_the_deadline_and_idles_meanwhile(
    client: Client, clock: SteppedClock
) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        calls: list[float] = []
        transport = client(f"http://127.0.0.1:{listener.getsockname()[1]}", idle=lambda: calls.append(clock.now))
        with pytest.raises(ServerUnreachable):
            transport.post(body(), deadline_s=1.0)
        assert clock.now < 1.5
        assert len(calls) >= 2


@pytest.mark.fault
@pytest.mark.parametrize("length", [b"Content-Length: 200", b"Transfer-Encoding: chunked"])
def test_a04_an_answer_that_is_cut_in_its_body_is_none_even_if_it_reads_like_one(client: Client, length: bytes) -> None:
    """What is cut off may have said otherwise; whether the frame is stored, its second delivery tells."""
    answer = b'{"stored": 1, "duplicate": 0}'
    answer = b"%x\r\n%b\r\n" % (len(answer), answer) if b"chunked" in length else answer

    def cut(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 200 OK\r\n" + length + b"\r\n\r\n" + answer)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(65536):  # closed with something unread, the kernel would take the answer back
                pass

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        thread = threading.Thread(target=cut, args=(listener,))
        thread.start()
        transport = client(f"http://127.0.0.1:{listener.getsockname()[1]}")
        with pytest.raises(ServerUnreachable, match="IncompleteRead"):
            transport.post(body(), deadline_s=5.0)
        thread.join()
    assert transport._connection is None, "what comes next on this connection belongs to the answer that was cut"


@pytest.mark.fault
def test_a03_headers_that_never_end_end_at_the_deadline(client: Client, clock: SteppedClock) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        ended = threading.Event()

        def drip() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(b"HTTP/1.1 200 OK\r\n")
                try:
                    while not ended.wait(0.05):
                        connection.sendall(b"X-Filler: 1\r\n"[:4])
                except OSError:
                    return

        thread = threading.Thread(target=drip, daemon=True)
        thread.start()
        with pytest.raises(ServerUnreachable):
            client(f"http://127.0.0.1:{listener.getsockname()[1]}").post(body(), deadline_s=1.0)
        assert clock.now < 1.5
        ended.set()
        thread.join(5)


@pytest.mark.fault
def test_a03_a_server_that_reads_nothing_of_a_large_frame_ends_at_the_deadline(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float | None] = []

    class Noting(socket.socket):
        def sendall(self, *arguments: Any) -> None:
            waits.append(self.gettimeout())
            super().sendall(*arguments)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setattr(socket, "socket", Noting)
        with pytest.raises(ServerUnreachable, match="timed out"):
            client(f"http://127.0.0.1:{listener.getsockname()[1]}").post(bytes(32 * 2**20), deadline_s=1.0)
    assert waits
    assert all(wait is not None and wait <= 1.0 for wait in waits), waits


@pytest.mark.fault
def test_a03_nothing_that_is_read_may_take_longer_than_what_is_left(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With TLS there may be something to read and yet not enough of it."""
    waits: list[float | None] = []

    class Noting(socket.socket):
        def recv_into(self, *arguments: Any) -> int:
            waits.append(self.gettimeout())
            return super().recv_into(*arguments)

    monkeypatch.setattr(socket, "socket", Noting)
    with IngestServer() as server:
        client(server.url).post(body(), deadline_s=3.0)
    assert [wait for wait in waits if wait is not None and wait <= 3.0], waits


@pytest.mark.fault
def test_a03_a_second_attempt_has_what_the_first_one_left_of_the_time(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed, monotonic = [0.0], time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + passed[0])
    with IngestServer() as server:

        def late(_: Frame) -> Scripted | None:
            passed[0] += 6.0
            return Scripted(cut=True) if len(server.frames) == 2 else Scripted(body=b"late", slow_s=0.05)

        transport = client(server.url)
        transport.post(body(1))
        server.rule = late
        with pytest.raises(ServerUnreachable):
            transport.post(body(2))
        assert [frame.seq for frame in server.frames] == [1, 2, 2]


def reply(status: int, text: bytes = b"", **headers: str) -> Reply:
    return Reply(status, {k.replace("_", "-"): v for k, v in headers.items()}, text)


@pytest.mark.fault
@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("7", 7.0),
        ("0", 1.0),
        ("-5", 1.0),
        ("1e9", 300.0),
        ("99999999999999999999", 300.0),
        ("nan", None),
        ("inf", 300.0),
        ("soon", None),
        ("", None),
        (formatdate(1_700_000_060, usegmt=True), 60.0),
        (formatdate(0, usegmt=True), 1.0),
        ("Fri, 31 Dec 9999 23:59:59 GMT", 300.0),
    ],
)
@pytest.mark.parametrize("status", [429, 503])
def test_a06_retry_after_is_kept_within_one_second_and_five_minutes(
    status: int, value: str, expected: float | None
) -> None:
    answer = judge(reply(status, retry_after=value), now=1_700_000_000.0)
    assert (answer.kind, answer.pause_s) == ("retry", expected)


@pytest.mark.fault
@pytest.mark.parametrize(
    "given",
    [
        reply(200, b"<html>Please log in</html>"),
        reply(200, b""),
        reply(200, b"{}"),
        reply(200, b"[]"),
        reply(200, b'{"stored": "many", "duplicate": 0}'),
        reply(200, b'{"stored": 1}'),
        reply(200, b'{"stored": -1, "duplicate": 0}'),
        reply(200, b'{"stored": 1, "duplicate": true}'),
        reply(200, b'{"stored": %d, "duplicate": 0}' % (10**400)),
        reply(200, b"\xff\xfe"),
        reply(200, b"[" * 100_000),
        reply(204),
        reply(201, b'{"stored": 1, "duplicate": 0}'),
        reply(302, location="https://login.example"),
        reply(301, b'{"stored": 1, "duplicate": 0}', location="/"),
        reply(404, b"no such page"),
        reply(405),
    ],
    ids=lambda given: f"{given.status}-{given.body[:12]!r}",
)
def test_a10_what_is_not_our_reply_is_not_an_acknowledgement(given: Reply) -> None:
    assert judge(given).kind == "foreign"


@pytest.mark.fault
@pytest.mark.parametrize(
    "count", [b"-50", b"true", b"1e30", b'"many"', b"1" + bytes(400).replace(b"\0", b"0"), b"null"]
)
def test_a10_a_count_that_counts_nothing_is_one(count: bytes) -> None:
    """Whoever answers so: an infinity in our own account would end the agent."""
    text = (
        b'{"stored": 1, "duplicate": 0, "rejected": [{"name": "x", "count": %s}, {"name": "y"}, {"count": 7}, 3]}'
        % count
    )
    assert [item["count"] for item in judge(reply(200, text)).rejected] == [1, 1, 7]


@pytest.mark.fault
def test_a10_a_redirect_is_not_followed(client: Client) -> None:
    with IngestServer() as elsewhere:
        with IngestServer(Scripted(status=307, headers={"Location": elsewhere.url + "/api/v1/ingest"})) as server:
            assert judge(client(server.url).post(body())).kind == "foreign"
        assert elsewhere.frames == []


def test_the_servers_own_words_are_in_the_reason() -> None:
    answer = judge(reply(422, b'{"error": {"code": "bad", "message": "column loss is too short"}}'))
    assert (answer.kind, answer.reason) == ("refused", "status 422: column loss is too short")


@pytest.mark.fault
def test_a24_on_loopback_the_proxy_of_the_environment_is_not_asked(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("all_proxy", f"http://127.0.0.1:{free_port()}")
    with IngestServer() as server:
        assert judge(client(server.url).post(body())).kind == "acked"


@pytest.mark.fault
def test_a24_elsewhere_the_proxy_of_the_environment_carries_the_frame(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    with IngestServer() as proxy:
        monkeypatch.setenv("http_proxy", f"http://user:word@127.0.0.1:{proxy.port}")
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        assert judge(client("http://monitor.invalid:8420").post(body())).kind == "acked"
    assert proxy.headers[0]["host"] == "monitor.invalid:8420"
    assert proxy.headers[0]["proxy-authorization"] == "Basic dXNlcjp3b3Jk"


@pytest.mark.fault
@pytest.mark.parametrize("variable", ["no_proxy", "NO_PROXY"])
def test_a24_what_needs_no_proxy_is_asked_directly(
    client: Client, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, ".example,monitor.invalid")
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_port()}")
    with IngestServer() as server:
        found = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", server.port))]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
        assert judge(client("http://monitor.invalid:8420").post(body())).kind == "acked"


@pytest.mark.fault
def test_a24_an_address_is_not_looked_up(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """The look-up opens sockets of its own, which a fork in between would leave in the child."""

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("looked up")

    with IngestServer() as server:
        monkeypatch.setattr(socket, "getaddrinfo", fail)
        assert judge(client(server.url).post(body())).kind == "acked"


def test_an_https_servers_certificate_and_name_are_verified(client: Client) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        transport = client(f"https://127.0.0.1:{listener.getsockname()[1]}")
        with pytest.raises(ServerUnreachable):
            transport.post(body(), deadline_s=0.1)
    assert transport._context is not None
    assert transport._context.verify_mode is ssl.CERT_REQUIRED
    assert transport._context.check_hostname


@pytest.fixture
def tunnelling(
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Callable[[Callable[[socket.socket, bytes], None]], HttpTransport]]:
    """tunnelling(answer): a transport to an https server behind a proxy; `answer` is given the connection and what was
    asked."""
    for name in ("no_proxy", "NO_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setenv("https_proxy", f"http://user:word@127.0.0.1:{listener.getsockname()[1]}")
        threads: list[threading.Thread] = []

        def make(answer: Callable[[socket.socket, bytes], None]) -> HttpTransport:
            def serve() -> None:
                connection, _ = listener.accept()
                with connection, contextlib.suppress(OSError):
                    answer(connection, connection.recv(65536))

            threads.append(threading.Thread(target=serve, daemon=True))
            threads[-1].start()
            return HttpTransport("https://monitor.invalid:8420", "pfa_ingest_key")

        yield make
        for thread in threads:
            thread.join(10)


@pytest.mark.fault
def test_a24_behind_a_proxy_an_https_server_is_asked_through_a_tunnel_and_the_proxy_gets_neither_key_nor_frame(
    tunnelling: Callable[..., HttpTransport],
) -> None:
    asked: list[bytes] = []

    def answer(connection: socket.socket, request: bytes) -> None:
        asked.append(request)
        connection.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
        asked.append(connection.recv(65536))

    with pytest.raises(ServerUnreachable, match="through the proxy"):
        tunnelling(answer).post(body())
    head, hello = asked
    assert head.startswith(b"CONNECT monitor.invalid:8420 HTTP/1.")
    assert b"Proxy-Authorization: Basic dXNlcjp3b3Jk" in head
    assert b"pfa_" not in head
    assert hello[0] == 22, "what goes through the tunnel is no TLS handshake"


@pytest.mark.fault
def test_a03_a_proxy_that_never_comes_to_the_end_of_its_answer_ends_at_the_deadline(
    tunnelling: Callable[..., HttpTransport], clock: SteppedClock
) -> None:
    given_up = threading.Event()

    def drip(connection: socket.socket, _: bytes) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\n")
        for _ in range(100):
            if given_up.wait(0.05):
                return
            connection.sendall(b"X-Filler: 1\r\n"[:4])

    with pytest.raises(ServerUnreachable):
        tunnelling(drip).post(body(), deadline_s=1.0)
    assert clock.now < 1.5
    given_up.set()


def test_a_proxy_that_is_away_is_named_as_what_did_not_answer(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setenv("http_proxy", f"http://user:word@127.0.0.1:{port}")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ServerUnreachable, match=f"refused, through the proxy 127.0.0.1:{port}$"):
        client("http://monitor.invalid:8420").post(body())


def test_a_redirect_says_where_to_without_what_it_asks_there() -> None:
    answer = judge(reply(302, location="https://login.example/start?state=secret"))
    assert (answer.kind, answer.reason) == ("foreign", "status 302 to https://login.example/start")


@pytest.mark.fault
def test_a24_a_name_that_does_not_resolve_is_unreachable(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)

    def fail(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    with pytest.raises(ServerUnreachable, match="not known"):
        client("http://monitor.invalid:8420").post(body())


@pytest.mark.fault
def test_a24_a_server_with_an_ipv6_address_is_reached(client: Client) -> None:
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    with socket.socket(socket.AF_INET6) as listener:
        try:
            listener.bind(("::1", 0))
        except OSError:
            pytest.skip("no IPv6 here")
        listener.listen()

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                text = b'{"stored": 0, "duplicate": 0}'
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(text), text))

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        assert judge(client(f"http://[::1]:{listener.getsockname()[1]}").post(body())).kind == "acked"
        thread.join(5)
