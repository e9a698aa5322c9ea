"""An address that begins with https:// where plain HTTP is spoken, and the other way round: agent, client and commands
say so."""

from __future__ import annotations

import contextlib
import socket
import ssl

import pytest
from ingest_server import IngestServer
from listening import answering, say

from perfagent.delivery.transport import HttpTransport
from perfagent.errors import ServerUnreachable
from perfagent_client.client import Client
from perfagent_server.commands.connection import AdminApi

pytestmark = pytest.mark.real


def by_agent(server, _):
    with contextlib.closing(HttpTransport(server)) as transport:
        transport.post(b"", deadline_s=5.0)


def by_client(server, _):
    with Client(server) as client:
        list(client.runs())


def by_command(server, folder):
    AdminApi(server, folder).request("GET", "/keys")


def shake_hands(connection: socket.socket) -> None:
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).wrap_socket(connection, server_side=True)


def alert(connection: socket.socket) -> None:
    """Of TLS, for what is no TLS."""
    say(connection, b"\x15\x03\x03\x00\x02\x02\x46")


CASES = [("https", None, by_agent), ("https", None, by_client), ("https", None, by_command)]


@pytest.mark.parametrize(
    ("given", "answer", "ask"), [*CASES, ("http", shake_hands, by_client), ("http", alert, by_agent)]
)
def test_wrong_scheme_is_told_with_the_address_to_give(tmp_path, given, answer, ask):
    """answer: of what speaks TLS; None: our server, by plain HTTP."""
    with IngestServer() as server, answering(answer or alert) as tls:
        there = tls if answer is not None else server.url.removeprefix("http://")
        with pytest.raises(
            ServerUnreachable, match=rf"give {'http' if given == 'https' else 'https'}://{there}"
        ) as caught:
            ask(f"{given}://{there}", tmp_path)
    assert "TLS" in str(caught.value)
