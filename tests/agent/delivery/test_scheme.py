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

from perfagent.delivery.transport import HttpTransport
from perfagent.errors import ServerUnreachable
from perfagent.wire import Frame, encode
from perfagent_client.client import Client
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
