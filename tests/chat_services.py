"""Local servers that answer for the hosts of chat services and for a mail server, with certificates of their own
authority. Nothing leaves this machine: a name that no server answers for does not resolve."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest
import trustme
from aiosmtpd.smtp import SMTP, AuthResult, Envelope, LoginPassword

Answer = tuple[int, dict[str, str], bytes]


@cache
def authority() -> trustme.CA:
    """A throw-away authority; making one takes a while."""
    return trustme.CA()


def certified(*names: str, by: trustme.CA | None = None) -> ssl.SSLContext:
    """The server's side of TLS, with a certificate for these names."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    (by or authority()).issue_cert(*names).configure_cert(context)
    return context


@dataclass(frozen=True)
class Request:
    host: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class ChatService:
    """An HTTPS server for some host names. answer: what it says to a request; silence_s: how long it thinks before."""

    def __init__(
        self,
        *names: str,
        answer: Callable[[Request], Answer] = lambda _: (200, {}, b"ok"),
        by: trustme.CA | None = None,
    ) -> None:
        self.names, self.requests, self._lock = names, [], threading.Lock()
        self.answer, self.released = answer, threading.Event()
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                parts = urlsplit(self.path)
                headers = {name.lower(): value for name, value in self.headers.items()}
                request = Request(headers["host"], parts.path, dict(parse_qsl(parts.query)), headers, body)
                with service._lock:
                    service.requests.append(request)
                status, more, said = service.answer(request)
                self.send_response(status)
                for name, value in {"Content-Length": str(len(said)), **more}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(said)

            do_GET = do_POST  # noqa: N815 - as http.server calls them

            def log_message(self, *arguments: Any) -> None: ...

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *arguments: Any) -> None: ...  # a client that hung up, on purpose

        self._http = Server(("127.0.0.1", 0), Handler)
        context = certified(*names, by=by)
        self._http.socket = context.wrap_socket(self._http.socket, server_side=True, do_handshake_on_connect=False)
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()

    requests: list[Request]

    @property
    def port(self) -> int:
        return int(self._http.server_port)

    def __enter__(self) -> ChatService:
        return self

    def __exit__(self, *error: object) -> None:
        self.released.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join(timeout=5)


def answers_for(patch: pytest.MonkeyPatch, *services: ChatService, ports: dict[str, int] | None = None) -> None:
    """Lets the names of the services, whatever the port that is asked for, lead to them. All other names lead nowhere."""
    known = {name: service.port for service in services for name in service.names} | (ports or {})
    real = socket.getaddrinfo

    def look_up(host: Any, port: Any, *options: Any, **named: Any) -> Any:
        if host in known:
            return real("127.0.0.1", known[host], *options, **named)
        if host == "127.0.0.1":
            return real(host, port, *options, **named)
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    patch.setattr(socket, "getaddrinfo", look_up)


def trusts(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Makes this process trust the authority: requests by its own variable, mail by that of OpenSSL."""
    bundle = folder / "authority.pem"
    authority().cert_pem.write_to_path(str(bundle))
    patch.setenv("REQUESTS_CA_BUNDLE", str(bundle))
    patch.setenv("SSL_CERT_FILE", str(bundle))


@dataclass
class Mail:
    sender: str
    recipients: list[str]
    content: bytes
    encrypted: bool


@dataclass
class MailServer:
    """A real mail server (aiosmtpd) on a port of its own. tls: "starttls", "ssl" or "". accounts: who may log in; without any,
    everybody may send. refused: the reply to a recipient that is not taken."""

    name: str = "smtp.example.com"
    tls: str = "starttls"
    accounts: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    by: trustme.CA | None = None
    chat: str = ""
    mails: list[Mail] = field(default_factory=list)
    port: int = 0

    async def handle_RCPT(  # noqa: N802
        self, server: SMTP, session: Any, envelope: Envelope, address: str, options: list[str]
    ) -> str:
        if address in self.refused:
            return self.refused[address]
        envelope.rcpt_tos.append(address)
        return "250 OK"

    async def handle_DATA(self, server: SMTP, session: Any, envelope: Envelope) -> str:  # noqa: N802
        encrypted = bool(session.ssl) or self.tls == "ssl"
        assert isinstance(envelope.content, bytes)
        self.mails.append(Mail(str(envelope.mail_from), list(envelope.rcpt_tos), envelope.content, encrypted))
        return "250 taken"

    def _knows(self, server: SMTP, session: Any, envelope: Envelope, mechanism: str, data: Any) -> AuthResult:
        assert isinstance(data, LoginPassword)
        user, password = data.login.decode(), data.password.decode()
        # A server that is as talkative as can be.
        reply = None if self.accounts.get(user) == password else f"535 5.7.8 {self.chat} not known: {user} {password}"
        return AuthResult(success=reply is None, handled=reply is None, message=reply)

    def __enter__(self) -> MailServer:
        context = certified(self.name, by=self.by)
        self._loop = asyncio.new_event_loop()

        self._protocols: list[SMTP] = []

        def protocol() -> SMTP:
            made = SMTP(
                self, hostname=self.name, loop=self._loop, tls_context=context if self.tls == "starttls" else None,
                require_starttls=self.tls == "starttls", authenticator=self._knows, auth_required=bool(self.accounts),
                auth_require_tls=False,
            )  # fmt: skip
            self._protocols.append(made)
            return made

        listening = self._loop.create_server(protocol, "127.0.0.1", 0, ssl=context if self.tls == "ssl" else None)
        self._server = self._loop.run_until_complete(listening)
        self.port = self._server.sockets[0].getsockname()[1]
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        async def close() -> None:
            self._server.close()
            for protocol in self._protocols:
                if protocol.transport is not None:
                    protocol.transport.close()
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
            await asyncio.sleep(0)

        asyncio.run_coroutine_threadsafe(close(), self._loop).result(timeout=5)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5)
        self._loop.close()
