"""An address that begins with https:// where plain HTTP is spoken, and the other way round: agent, client and commands
say so."""

from __future__ import annotations

import contextlib
import socket
import ssl
from pathlib import Path

import pytest
from ingest_server import IngestServer
from listening import answering, say

from perfagent.delivery.transport import HttpTransport, judge
from perfagent.errors import ServerUnreachable
from perfagent.wire import Frame, encode
from perfagent_client.client import ApiError, Client
from perfagent_server.commands.connection import AdminApi

pytestmark = pytest.mark.real

BODY = encode(Frame(project="p", run="r", source="s", attempt=1, rank=0, seq=1))


def by_agent(server: str, _: Path) -> None:
    with contextlib.closing(HttpTransport(server)) as transport:
        transport.post(BODY, deadline_s=5.0)


def by_client(server: str, _: Path) -> None:
    with Client(server) as client:
        list(client.runs())


def by_command(server: str, folder: Path) -> None:
    AdminApi(server, folder).request("GET", "/keys")


ALERT = b"\x15\x03\x03\x00\x02\x02\x46"
"""Of TLS, for what is no TLS."""


def shake_hands(connection: socket.socket) -> None:
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).wrap_socket(connection, server_side=True)


@pytest.mark.parametrize(
    ("given", "answer", "ask"),
    [
        *(("https", None, ask) for ask in (by_agent, by_client, by_command)),
        ("http", shake_hands, by_client),
        ("http", lambda connection: say(connection, ALERT), by_agent),
    ],
)
def test_wrong_scheme_is_told_with_the_address_to_give(tmp_path, given, answer, ask):
    """answer: of what speaks TLS; None: our server, by plain HTTP."""
    with contextlib.ExitStack() as stack:
        if answer is not None:
            there = stack.enter_context(answering(answer))
        else:
            there = stack.enter_context(IngestServer()).url.removeprefix("http://")
        with pytest.raises(ServerUnreachable) as caught:
            ask(f"{given}://{there}", tmp_path)
    said = str(caught.value)
    assert f"give {'http' if given == 'https' else 'https'}://{there}" in said
    assert "TLS" in said


PAGE = b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/html\r\nConnection: close\r\n\r\n"
PAGE += b"<html>The plain HTTP request was sent to HTTPS port</html>"


def test_proxy_that_answers_without_tls_refuses_no_frame(tmp_path: Path) -> None:
    with answering(lambda connection: say(connection, PAGE)) as there:
        with contextlib.closing(HttpTransport(f"http://{there}")) as transport:
            answer = judge(transport.post(BODY))
        assert answer.kind == "foreign", "a refused frame would never be sent again"
        assert "https://" in answer.reason
        for ask, error in ((by_client, ApiError), (by_command, Exception)):
            with pytest.raises(error, match=r"TLS.* https://"):
                ask(f"http://{there}", tmp_path)
