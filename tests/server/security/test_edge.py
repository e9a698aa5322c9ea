"""What a request passes before any route: Host, Origin, sizes, times, headers."""

from __future__ import annotations

import contextlib
import http.client
import logging
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from api_builders import ADMIN, Listening, api, frame, listening, send
from websockets import InvalidStatus, Origin
from websockets.sync.client import connect

from perfagent.wire import encode
from perfagent_server.routes.edge import HostCheck, host_name
from perfagent_server.settings import Settings


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("a.example", "a.example"),
        ("A.Example:8420", "a.example"),
        ("127.0.0.1:80", "127.0.0.1"),
        ("[::1]:80", "::1"),
        ("[::1]", "::1"),
        ("", ""),
        (":80", ""),
    ],
)
def test_the_name_in_a_host_header(host: str, name: str) -> None:
    assert host_name(host) == name


@pytest.mark.parametrize(
    "host",
    ["localhost", "localhost:1", "127.0.0.1:8420", "[::1]:8420", "LOCALHOST", "mine.example:443", "a.lan.example"],
)
def test_own_hosts_are_served(tmp_path: Path, host: str) -> None:
    with api(tmp_path, allowed_hosts=(".lan.example",), public_url="https://mine.example") as client:
        assert client.get("/healthz", headers={"Host": host}).status_code == 200


@pytest.mark.fault
@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8420",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "10.0.0.1",
        "",
        "[",
        "lan.example",
    ],
)
def test_x07_foreign_hosts_are_refused_with_the_cause(tmp_path: Path, host: str) -> None:
    with api(tmp_path, allowed_hosts=(".lan.example",)) as client:
        answer = client.get("/api/v1/runs", headers={"Host": host})
        assert answer.status_code == 403
        assert answer.json()["error"]["code"] == "host_not_allowed"
        assert "--allowed-hosts" in answer.json()["error"]["message"]


@pytest.mark.fault
def test_x07_a_public_address_is_served_by_its_number_but_not_by_any_name(tmp_path: Path) -> None:
    settings = Settings(data=tmp_path, host="0.0.0.0", auth="required")
    check = HostCheck(lambda *_: None, settings)  # type: ignore[arg-type, return-value]
    assert check.allows("192.168.1.5:8420")
    assert check.allows(socket.gethostname())
    assert not check.allows("evil.example")


@pytest.mark.fault
@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:9999"},
        {"Origin": "http://["},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
def test_x07_a_change_from_another_sites_page_is_refused(tmp_path: Path, headers: dict[str, str]) -> None:
    with api(tmp_path) as client:
        for method, path in (
            ("POST", "/api/v1/log"),
            ("POST", "/api/v1/ingest"),
            ("DELETE", "/api/v1/runs/r1"),
            ("PATCH", "/api/v1/runs/r1"),
        ):
            answer = client.request(method, path, headers={**ADMIN, **headers})
            assert answer.status_code == 403, (method, path)
            assert answer.json()["error"]["code"] == "cross_origin"
        assert client.get("/api/v1/runs", headers=headers).status_code == 200, "reading is the browser's own rule"


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Origin": "http://127.0.0.1:8420"},
        {"Origin": "http://127.0.0.1:8420", "Sec-Fetch-Site": "same-origin"},
        {"Sec-Fetch-Site": "none"},
    ],
)
def test_our_own_page_and_programs_may_change(tmp_path: Path, headers: dict[str, str]) -> None:
    with api(tmp_path) as client:
        assert client.post("/api/v1/log", json={"run": "a", "metrics": {"x": 1}}, headers=headers).status_code == 200


@pytest.mark.fault
def test_x06_pages_say_what_they_may_load_and_the_api_is_not_kept(tmp_path: Path) -> None:
    with api(tmp_path, dashboard=True) as client:
        for path, status in {"/": 200, "/docs": 200, "/login": 200, "/run/nothing": 404}.items():
            answer = client.get(path)
            assert answer.status_code == status, path
            policy = answer.headers["Content-Security-Policy"]
            assert "frame-ancestors 'none'" in policy
            assert "unsafe-eval" not in policy
            assert "'unsafe-inline'" not in policy.partition("script-src")[2].partition(";")[0]
            assert answer.headers["X-Content-Type-Options"] == "nosniff"
            assert answer.headers["Referrer-Policy"] == "same-origin"
        answer = client.get("/api/v1/runs")
        assert answer.headers["Cache-Control"] == "no-store"
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert "access-control-allow-origin" not in answer.headers


@pytest.mark.fault
def test_x06_nothing_is_loaded_from_elsewhere(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        for path in ("/docs", "/docs/docs.js", "/docs/docs.css", "/login"):
            text = client.get(path).text
            assert "http://" not in text and "https://" not in text


@pytest.mark.fault
@pytest.mark.parametrize("path", ["/api/v1/ingest", "/api/v1/log", "/api/v1/keys"])
def test_x02_a_body_over_the_limit_is_413_in_our_shape(tmp_path: Path, path: str) -> None:
    with api(tmp_path, max_body_bytes=1000) as client:
        media = {"Content-Type": "application/x-msgpack" if path.endswith("ingest") else "application/json"}
        for body in (b" " * 1001, iter([b" " * 600, b" " * 600])):  # with a length, and in chunks without one
            answer = client.post(path, content=body, headers={**media, **ADMIN})
            assert answer.status_code == 413, answer.text
            assert answer.json()["error"]["code"] == "too_large"


def read_all(connection: socket.socket) -> bytes:
    connection.settimeout(20)
    parts = []
    while part := connection.recv(65536):
        parts.append(part)
    return b"".join(parts)


@contextlib.contextmanager
def held(server: Listening) -> Iterator[None]:
    """Holds the server's event loop. So it sees a connection and what is sent on it at the same moment."""
    goes_on = threading.Event()
    server.server.servers[0].get_loop().call_soon_threadsafe(goes_on.wait)
    try:
        yield
    finally:
        goes_on.set()


def talk(server: Listening, *pieces: bytes) -> bytes:
    """What comes back, until the server closes the connection."""
    with contextlib.ExitStack() as stack:
        with held(server):
            connection = stack.enter_context(socket.create_connection(server.address, timeout=20))
            for piece in pieces:
                connection.sendall(piece)
        return read_all(connection)


@pytest.mark.fault
@pytest.mark.parametrize(
    "start",
    [
        b"",
        b"GET /healthz HT",
        b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX-Slow: ",
        b"POST /api/v1/log HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{",
        b"POST /api/v1/ingest HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabcde\r\n",
    ],
    ids=["nothing", "line", "head", "body", "chunk"],
)
def test_x02_a_request_that_never_ends_is_cut_off(tmp_path: Path, start: bytes) -> None:
    with listening(tmp_path, read_timeout_s=0.5) as server:
        began = time.monotonic()
        answer = talk(server, start)
        assert answer.startswith(b"HTTP/1.1 408"), answer[:200]
        assert time.monotonic() - began < 15
        assert talk(server, b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").startswith(
            b"HTTP/1.1 200"
        )


def test_an_idle_connection_between_requests_is_kept(tmp_path: Path) -> None:
    with (
        listening(tmp_path, read_timeout_s=0.3) as server,
        contextlib.closing(http.client.HTTPConnection(*server.address, timeout=20)) as client,
    ):

        def answer() -> int:
            with held(server):
                client.request("GET", "/healthz", headers={"Host": "localhost"})
            response = client.getresponse()
            assert response.read()
            return response.status

        assert answer() == 200
        connection = client.sock
        connection.settimeout(1.0)
        with pytest.raises(TimeoutError):  # well past the read timeout: the connection is idle, not slow
            connection.recv(1)
        connection.settimeout(20)
        assert answer() == 200
        assert client.sock is connection


@pytest.mark.fault
@pytest.mark.parametrize(
    "request_bytes",
    [
        b"\x00\x01\x02\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\nConnection: close\r\n\r\n",
        b"POST /api/v1/log HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef",
        b"POST /api/v1/log HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999999999999999\r\nConnection: close\r\n\r\n",
        b"POST /api/v1/log HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\nZZ\r\n",
        b"GET /%ff%fe HTTP/1.1\r\nHost: \xff\xff\r\nConnection: close\r\n\r\n",
        b"GET /api/v1/runs/%00 HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
    ],
    ids=range(8),
)
def test_x02_broken_http_is_the_senders_fault(tmp_path: Path, request_bytes: bytes) -> None:
    with listening(tmp_path, read_timeout_s=0.5) as server:
        answer = talk(server, request_bytes)
        assert answer.startswith(b"HTTP/1.1 4"), answer[:200]


@pytest.mark.fault
def test_x02_a_decoded_bomb_is_not_held_in_memory(tmp_path: Path) -> None:
    import resource
    import zlib

    with api(tmp_path) as client:
        send(client, frame({"loss": [1.0]}))
        bomb = zlib.compress(b"\0" * (200 * 2**20), 9)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        headers = {"Content-Type": "application/x-msgpack", "Content-Encoding": "deflate"}
        assert client.post("/api/v1/ingest", content=bomb, headers=headers).status_code == 413
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert grown * 1024 < 2 * 32 * 2**20
        assert (
            client.post(
                "/api/v1/ingest",
                content=encode(frame({"loss": [1.0]}, seq=2)),
                headers={"Content-Type": "application/x-msgpack"},
            ).status_code
            == 200
        )


@pytest.mark.parametrize("path", ["/healthz", "/livez", "/readyz", "/", "/api/v1/runs", "/openapi.json"])
def test_head_is_answered_as_get_without_a_body(tmp_path: Path, path: str) -> None:
    with listening(tmp_path, dashboard=path == "/") as server:
        head = httpx.head(f"{server.url}{path}", trust_env=False)
        assert (head.status_code, head.content) == (200, b"")
        assert httpx.head(f"{server.url}/api/v1/nothing", trust_env=False).status_code == 404


def test_a_refused_socket_is_no_error_of_the_server(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with listening(tmp_path) as server:
        url = server.url.replace("http", "ws") + "/ws/live"
        with pytest.raises(InvalidStatus) as refused, connect(url, origin=Origin("http://evil.example"), proxy=None):
            pass
        assert refused.value.response.status_code == 403
        assert "cross_origin" in refused.value.response.body.decode()
    assert [record.levelname for record in caplog.records if record.levelno >= logging.ERROR] == []
