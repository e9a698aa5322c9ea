"""What a request passes before any route: Host, Origin, sizes, times, headers."""

from __future__ import annotations

import contextlib
import logging
import resource
import socket
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from api_builders import ADMIN, MSGPACK, Listening, api, frame, listening, send
from websockets import InvalidStatus, Origin
from websockets.sync.client import connect

from perfagent_server.routes.edge import HostCheck, host_name
from perfagent_server.settings import Settings

HEALTH = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"
LOG = b"POST /api/v1/log HTTP/1.1\r\nHost: localhost\r\n"
CLOSE = b"Connection: close\r\n\r\n"


def test_the_name_in_a_host_header() -> None:
    names = {
        "A.Example:8420": "a.example",
        "127.0.0.1:80": "127.0.0.1",
        "[::1]:80": "::1",
        "[::1]": "::1",
        "": "",
        ":80": "",
    }
    assert {host: host_name(host) for host in names} == names


OWN = ("localhost:1", "127.0.0.1:8420", "[::1]:8420", "LOCALHOST", "mine.example:443", "a.lan.example")
FOREIGN = ("evil.example:8420", "127.0.0.1.evil.example", "localhost.evil.example", "10.0.0.1", "", "[", "lan.example")


@pytest.mark.fault
def test_x07_foreign_hosts_are_refused_with_the_cause(tmp_path: Path) -> None:
    with api(tmp_path, allowed_hosts=(".lan.example",), public_url="https://mine.example") as client:
        for host in OWN:
            assert client.get("/healthz", headers={"Host": host}).status_code == 200, host
        for host in FOREIGN:
            answer = client.get("/api/v1/runs", headers={"Host": host})
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "host_not_allowed"), host
            assert "--allowed-hosts" in answer.json()["error"]["message"]
    check = HostCheck(lambda *_: None, Settings(data=tmp_path, host="0.0.0.0", auth="required"))  # type: ignore[arg-type, return-value]
    public = [check.allows(name) for name in ("192.168.1.5:8420", socket.gethostname(), "evil.example")]
    assert public == [True, True, False], "a public address is served by its number, but not by any name"


@pytest.mark.fault
def test_x07_a_change_from_another_sites_page_is_refused(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        for headers in (
            *({"Origin": origin} for origin in ("http://evil.example", "null", "http://127.0.0.1:9999", "http://[")),
            *({"Sec-Fetch-Site": site} for site in ("cross-site", "same-site")),
        ):
            for method, path in (("POST", "log"), ("POST", "ingest"), ("DELETE", "runs/r1"), ("PATCH", "runs/r1")):
                answer = client.request(method, f"/api/v1/{path}", headers={**ADMIN, **headers})
                assert (answer.status_code, answer.json()["error"]["code"]) == (403, "cross_origin"), (path, headers)
            assert client.get("/api/v1/runs", headers=headers).status_code == 200, "reading is the browser's own rule"
        ours = {"Origin": "http://127.0.0.1:8420"}
        for headers in ({}, ours, {**ours, "Sec-Fetch-Site": "same-origin"}, {"Sec-Fetch-Site": "none"}):
            row = {"run": "a", "metrics": {"x": 1}}
            assert client.post("/api/v1/log", json=row, headers=headers).status_code == 200, headers


@pytest.mark.fault
def test_x06_pages_say_what_they_may_load(tmp_path: Path) -> None:
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
        assert (answer.headers["Cache-Control"], answer.headers["X-Content-Type-Options"]) == ("no-store", "nosniff")
        assert "access-control-allow-origin" not in answer.headers
        for path in ("/docs", "/docs/docs.js", "/docs/docs.css", "/login"):  # nothing is loaded from elsewhere
            assert "http://" not in (text := client.get(path).text) and "https://" not in text, path


@pytest.mark.fault
def test_x02_a_body_over_the_limit_is_413_in_our_shape(tmp_path: Path) -> None:
    with api(tmp_path, max_body_bytes=1000) as client:
        for path in ("ingest", "log", "keys"):
            media = MSGPACK if path == "ingest" else {"Content-Type": "application/json"}
            for body in (b" " * 1001, iter([b" " * 600, b" " * 600])):  # with a length, and in chunks without one
                answer = client.post(f"/api/v1/{path}", content=body, headers={**media, **ADMIN})
                assert (answer.status_code, answer.json()["error"]["code"]) == (413, "too_large"), path


@contextlib.contextmanager
def held(server: Listening) -> Iterator[None]:
    """Holds the server's event loop. So it sees a connection and what is sent on it at the same moment."""
    goes_on = threading.Event()
    server.server.servers[0].get_loop().call_soon_threadsafe(goes_on.wait)
    try:
        yield
    finally:
        goes_on.set()


def talk(server: Listening, sent: bytes) -> bytes:
    """What comes back, until the server closes the connection."""
    with contextlib.ExitStack() as stack:
        with held(server):
            connection = stack.enter_context(socket.create_connection(server.address, timeout=20))
            connection.sendall(sent)
        return b"".join(iter(lambda: connection.recv(65536), b""))


@pytest.mark.real
@pytest.mark.fault
def test_x02_a_request_that_never_ends_or_is_broken_is_cut_off(tmp_path: Path) -> None:
    with listening(tmp_path, read_timeout_s=0.5) as server:
        for start in (
            b"",
            b"GET /healthz HT",
            b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX-Slow: ",
            LOG + b"Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{",
            b"POST /api/v1/ingest HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabcde\r\n",
        ):
            began = time.monotonic()
            assert talk(server, start).startswith(b"HTTP/1.1 408"), start
            assert time.monotonic() - began < 15
        for broken in (
            b"\x00\x01\x02\r\n\r\n",
            b"GET / HTTP/9.9\r\n\r\n",
            HEALTH + b"Content-Length: -5\r\n" + CLOSE,
            LOG + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef",
            LOG + b"Content-Length: 99999999999999999999999\r\n" + CLOSE,
            LOG + b"Transfer-Encoding: chunked\r\n" + CLOSE + b"ZZ\r\n",
            b"GET /%ff%fe HTTP/1.1\r\nHost: \xff\xff\r\n" + CLOSE,
            b"GET /api/v1/runs/%00 HTTP/1.1\r\nHost: localhost\r\n" + CLOSE,
        ):
            assert talk(server, broken).startswith(b"HTTP/1.1 4"), broken
        assert talk(server, HEALTH + CLOSE).startswith(b"HTTP/1.1 200")


@pytest.mark.fault
def test_x02_a_decoded_bomb_is_not_held_in_memory(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        send(client, frame({"loss": [1.0]}))
        bomb = zlib.compress(b"\0" * (200 * 2**20), 9)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        headers = {**MSGPACK, "Content-Encoding": "deflate"}
        assert client.post("/api/v1/ingest", content=bomb, headers=headers).status_code == 413
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert grown * 1024 < 2 * 32 * 2**20
        assert send(client, frame({"loss": [1.0]}, seq=2))["stored"] == 1


@pytest.mark.real
def test_head_and_a_refused_socket_are_answered(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with listening(tmp_path, dashboard=True) as server:
        for path in ("/healthz", "/readyz", "/", "/api/v1/runs", "/openapi.json"):
            head = httpx.head(f"{server.url}{path}", trust_env=False)
            assert (head.status_code, head.content) == (200, b""), path
        assert httpx.head(f"{server.url}/api/v1/nothing", trust_env=False).status_code == 404
        url = server.url.replace("http", "ws") + "/ws/live"
        with pytest.raises(InvalidStatus) as refused, connect(url, origin=Origin("http://evil.example"), proxy=None):
            pass
        assert refused.value.response.status_code == 403
        assert "cross_origin" in refused.value.response.body.decode()
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []
