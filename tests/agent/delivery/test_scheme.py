"""An address that begins with https:// where plain HTTP is spoken, and the other way round: agent, client and commands
say so."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ingest_server import IngestServer, Scripted

from perfagent.delivery.transport import HttpTransport, judge
from perfagent.errors import ServerUnreachable
from perfagent.wire import Frame, encode
from perfagent_client.client import ApiError, Client
from perfagent_server.commands.connection import AdminApi

BODY = encode(Frame(project="p", run="r", source="s", attempt=1, rank=0, seq=1))


def by_agent(server: str, _: Path) -> None:
    transport = HttpTransport(server)
    try:
        transport.post(BODY, deadline_s=5.0)
    finally:
        transport.close()


def by_client(server: str, _: Path) -> None:
    with Client(server) as client:
        list(client.runs())


def by_command(server: str, folder: Path) -> None:
    AdminApi(server, folder).request("GET", "/keys")


EVERY = pytest.mark.parametrize("ask", [by_agent, by_client, by_command])
Ask = Callable[[str, Path], None]


@contextlib.contextmanager
def answering(answer: Callable[[socket.socket], object]) -> Iterator[str]:
    """host:port of a listener that does this with each connection, and then closes it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection, contextlib.suppress(OSError):
                        answer(connection)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(10)


def say(connection: socket.socket, words: bytes) -> None:
    """An answer, after which everything that still comes is read: closed before, the connection would be reset."""
    connection.settimeout(5.0)
    connection.recv(65536)
    connection.sendall(words)
    connection.shutdown(socket.SHUT_WR)
    while connection.recv(65536):
        pass


def shake_hands(connection: socket.socket) -> None:
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).wrap_socket(connection, server_side=True)


@EVERY
def test_https_to_a_server_of_plain_http_names_the_address_to_give(ask: Ask, tmp_path: Path) -> None:
    with IngestServer() as server:
        there = server.url.removeprefix("http://")
        with pytest.raises(ServerUnreachable) as caught:
            ask(f"https://{there}", tmp_path)
    said = str(caught.value)
    assert "was given, and what listens there does not speak TLS" in said
    assert f"give http://{there}" in said
    assert said.startswith("https://")


@EVERY
def test_http_to_a_server_that_speaks_tls_names_the_address_to_give(ask: Ask, tmp_path: Path) -> None:
    with answering(shake_hands) as there, pytest.raises(ServerUnreachable) as caught:
        ask(f"http://{there}", tmp_path)
    said = str(caught.value)
    assert said.startswith("http://")
    assert "was given, and what listens there" in said
    assert "TLS" in said
    assert f"give https://{there}" in said


def test_a_tls_alert_is_known_for_what_it_is(tmp_path: Path) -> None:
    alert = b"\x15\x03\x03\x00\x02\x02\x46"
    with answering(lambda connection: say(connection, alert)) as there, pytest.raises(ServerUnreachable) as caught:
        by_agent(f"http://{there}", tmp_path)
    assert f"there speaks TLS: give https://{there}" in str(caught.value)


PAGE = b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/html\r\nConnection: close\r\n\r\n"
PAGE += b"<html>The plain HTTP request was sent to HTTPS port</html>"


def test_a_proxy_that_answers_without_tls_is_no_server_of_ours_and_refuses_no_frame(tmp_path: Path) -> None:
    with answering(lambda connection: say(connection, PAGE)) as there:
        transport = HttpTransport(f"http://{there}")
        answer = judge(transport.post(BODY))
        transport.close()
        assert answer.kind == "foreign", "a refused frame would never be sent again"
        assert "give its address with https://" in answer.reason
        for ask, error in ((by_client, ApiError), (by_command, Exception)):
            with pytest.raises(error, match="speaks TLS, give its address with https://"):
                ask(f"http://{there}", tmp_path)


def test_a_server_that_has_answered_and_hangs_up_is_not_said_to_speak_tls() -> None:
    with IngestServer() as server:
        transport = HttpTransport(server.url)
        transport.post(BODY)
        server.rule = lambda _: Scripted(cut=True)
        with pytest.raises(ServerUnreachable) as caught:
            transport.post(BODY)
        transport.close()
    assert "TLS" not in str(caught.value)
