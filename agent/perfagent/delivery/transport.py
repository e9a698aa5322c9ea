"""Sends one HTTP request at a time to the server, with one deadline for all of it, and interprets the answer.

`http.client` and not httpx: in a process that has torch it is loaded already (docs/internals/decisions.md). A server which
sends a byte a second is given up after ten seconds in all, not after ten seconds a byte. The look-up of a name, which nobody
can give up, comes before those. Redirects are never followed; on loopback no proxy is asked. Used by one thread at a time.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import io
import socket
import ssl
import time
import urllib.request
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Protocol
from urllib.parse import unquote, urlsplit

import msgspec

from perfagent.delivery.fork_safe_sockets import Dialer
from perfagent.endpoint.addresses import DEFAULT_SERVER, REFUSAL, is_loopback, refuses_plain_http, wrong_scheme
from perfagent.endpoint.admin_proof import AdminProof
from perfagent.endpoint.local_server import found_server
from perfagent.errors import ServerUnreachable

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

__all__ = ["Answer", "HttpTransport", "LeftOut", "Reply", "Transport", "judge", "packed"]

DEADLINE_S = 10.0
CONNECT_S = 5.0
MAX_REPLY_BYTES = 2**20
MIN_PAUSE_S, MAX_PAUSE_S = 1.0, 300.0
UNAUTHORIZED_PAUSE_S = 60.0
_KINDS = {
    400: "refused", 422: "refused", 401: "unauthorized", 403: "unauthorized", 413: "too_large", 408: "retry", 425: "retry",
    429: "retry",
}  # fmt: skip
"""Status -> `Answer.kind`, below 500."""
_Count = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
"""What we count with ends up in a series, as a float."""


class Reply(msgspec.Struct, frozen=True):
    """What came back: status, headers in lower case, body."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Transport(Protocol):
    """Carries one frame's bytes to the server. Raises ServerUnreachable when no whole answer came in time."""

    def post(self, body: bytes, *, encoding: str | None = None, deadline_s: float = DEADLINE_S) -> Reply: ...

    def close(self) -> None: ...

    def abandon(self) -> None:
        """In a forked child: let go of the socket without a word to the server."""


class LeftOut(msgspec.Struct, frozen=True):
    """Samples that the server did not store."""

    name: str = ""
    reason: str = ""
    count: _Count = 1


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What to do with a frame after its reply.

    kind: "acked" (stored), "retry" (later, after pause_s where the server said so), "too_large" (halve it), "refused"
    (never send it again), "unauthorized" (the key is missing or wrong), "foreign" (whatever answers there is not our
    server). watched: False where the server says that no page shows the run.
    """

    kind: str
    reason: str = ""
    pause_s: float | None = None
    stored: int = 0
    duplicate: int = 0
    rejected: Sequence[LeftOut] = ()
    commands: Sequence[Mapping[str, Any]] = ()
    watched: bool = True


def judge(reply: Reply) -> Answer:
    """The meaning of a reply. Only 200 with our own JSON acknowledges: a captive portal answers 200 too."""
    status = reply.status
    if status == 200:
        try:
            found = _decoder.decode(reply.body)
        except _UNREADABLE:
            return Answer(kind="foreign", reason=f"status 200 without our reply: {reply.body[:80]!r}")
        watched = reply.headers.get("perfagent-watched") != "0"
        return Answer(kind="acked", watched=watched, **msgspec.structs.asdict(found))
    kind, reason = _KINDS.get(status, "retry" if status >= 500 else "foreign"), _reason(reply)
    if status == 400 and ": " not in reason and refuses_plain_http(reply.body):
        kind, reason = "foreign", reason + REFUSAL
    pause_s = UNAUTHORIZED_PAUSE_S if kind == "unauthorized" else None
    if kind == "retry":
        pause_s = _pause(reply.headers.get("retry-after", ""))
    return Answer(kind=kind, reason=reason, pause_s=pause_s)


class _Acknowledgement(msgspec.Struct):
    stored: _Count
    duplicate: _Count
    rejected: list[LeftOut] = []
    commands: list[dict[str, Any]] = []


_decoder = msgspec.json.Decoder(_Acknowledgement)
_UNREADABLE = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)


def _reason(reply: Reply) -> str:
    text = ""
    with contextlib.suppress(*_UNREADABLE, TypeError, KeyError):
        text = str(msgspec.json.decode(reply.body)["error"]["message"])[:300]
    target = reply.headers.get("location", "").partition("?")[0][:200] if 300 <= reply.status < 400 else ""
    return f"status {reply.status}" + (f" to {target}" if target else "") + (f": {text}" if text else "")


def _pause(value: str) -> float | None:
    """Seconds of a Retry-After header, within 1 s to 5 min; None for none, or a date: the sender has its own pauses."""
    try:
        seconds = float(value)
    except ValueError:
        return None
    return min(max(seconds, MIN_PAUSE_S), MAX_PAUSE_S) if seconds == seconds else None  # "nan" is a float to Python


def packed(body: bytes, *, loopback: bool) -> tuple[bytes, str | None]:
    """(bytes, encoding): deflated where that helps. On loopback bytes cost nothing and CPU does."""
    if len(body) > 1024 and not (loopback and len(body) < 2**20):
        squeezed = zlib.compress(body, 1)
        if len(squeezed) < 0.9 * len(body):
            return squeezed, "deflate"
    return body, None


class HttpTransport:
    """POSTs to `{server}/api/v1/ingest` over one kept connection.

    follows: before each new connection it looks where this user's server on this machine listens now. idle: called
    about four times a second while it waits for an answer (the NVML sampler shares this thread).
    """

    def __init__(
        self,
        server: str,
        api_key: str | AdminProof | None = None,
        *,
        follows: bool = False,
        idle: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._aim(server)
        self.clock = clock
        self._follows = follows
        self._found = server != DEFAULT_SERVER
        """Whether a server of this user's was found, and not whoever is at the default address. Used if it follows."""
        self._proof = api_key if isinstance(api_key, AdminProof) else None
        self._key = api_key.strip() if isinstance(api_key, str) else None
        self.idle = idle
        self._connection: http.client.HTTPConnection | None = None
        self._answered = False
        """Whether there ever was an answer: what listens there speaks as we do."""
        self._through = ""
        """The proxy that is asked, as host:port."""
        self.dialer = Dialer(clock)
        self._context: ssl.SSLContext | None = None

    def _aim(self, server: str) -> None:
        self.server = server
        address = urlsplit(server)
        self._https = address.scheme == "https"
        self._host = address.hostname or "127.0.0.1"
        self._port = address.port or (443 if self._https else 80)
        self._path = address.path.rstrip("/") + "/api/v1/ingest"
        self._host_header = address.netloc.rpartition("@")[2]
        self.loopback = is_loopback(self._host)

    def _follow(self) -> None:
        """Raises OSError where the server that was found does not run: its port may be a stranger's by now."""
        found = found_server()
        if found is not None:
            self._aim(found)
            self._found = True
        elif self._found:
            raise ConnectionRefusedError("it does not run at the moment")

    def post(self, body: bytes, *, encoding: str | None = None, deadline_s: float = DEADLINE_S) -> Reply:
        deadline = self.clock() + deadline_s
        headers = {"Content-Type": "application/x-msgpack", "Accept": "application/json", "User-Agent": "perfagent"}
        if encoding:
            headers["Content-Encoding"] = encoding
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        try:
            for fresh in (self._connection is None, True):
                if self._proof is not None:  # one for each try: the server may have had the first
                    headers["Authorization"] = self._proof.header("POST", self._path)
                try:
                    return self._exchange(body, headers, deadline)
                except (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError):
                    self.close()
                    # a kept connection may have been closed by the other side in the meantime: once more on a new one
                    if fresh:
                        raise
            raise AssertionError("unreachable")
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.close()
            raise ServerUnreachable(self._why(error)) from error

    def _why(self, error: Exception) -> str:
        """In one line, and never with the key: people read it."""
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        hung_up = isinstance(error, (http.client.RemoteDisconnected, ConnectionResetError))
        known = self._answered or bool(self._through)  # what listens there speaks as we do, or is not what hung up
        address = f"{'https' if self._https else 'http'}://{self._host_header}"
        if scheme := wrong_scheme(address, error, hung_up=hung_up and not known):
            text = f"{scheme} ({text})"
        if self._key:
            text = text.replace(self._key, "[key]").replace(repr(self._key)[1:-1], "[key]")
        return " ".join(text.split()) + (f", through the proxy {self._through}" if self._through else "")

    def _exchange(self, body: bytes, headers: dict[str, str], deadline: float) -> Reply:
        if self._connection is not None and not self.dialer.is_ours:  # the script has closed it
            self.close()
        if self._connection is None:
            self._connection = self._connect(deadline)
            deadline += self.dialer.looked_up_s
        connection = self._connection
        sock = connection.sock
        sock.settimeout(max(0.001, deadline - self.clock()))
        headers = {"Host": self._host_header, **headers, **self._proxy_headers}
        connection.request("POST", self._target, body=body, headers=headers)
        response = self._response(sock, deadline, "POST")
        try:
            response.begin()
            found = response.read(MAX_REPLY_BYTES + 1)
            if response.length and len(found) <= MAX_REPLY_BYTES:  # read() with a size does not say so itself
                raise http.client.IncompleteRead(found, response.length)
            self._answered = True
            reply = Reply(response.status, {k.lower(): v for k, v in response.getheaders()}, found)
            keep = not response.will_close and len(found) <= MAX_REPLY_BYTES and response.isclosed()
        finally:
            response.close()
            # http.client refuses the next request until the response that it made was read; ours was made here
            connection._HTTPConnection__state = "Idle"  # type: ignore[attr-defined]
            connection._HTTPConnection__response = None  # type: ignore[attr-defined]
        if not keep:
            self.close()
        return reply

    def _response(self, sock: socket.socket, deadline: float, method: str | None) -> http.client.HTTPResponse:
        """A response read from the socket within the deadline."""
        return http.client.HTTPResponse(_DeadlineReader(sock, deadline, self), method=method)  # type: ignore[arg-type]

    def _connect(self, deadline: float) -> http.client.HTTPConnection:
        if self._follows:
            self._follow()
        timeout = max(0.001, min(CONNECT_S, deadline - self.clock()))
        proxy = self._proxy()
        host, port = proxy[:2] if proxy else (self._host, self._port)
        self._target, self._proxy_headers = self._path, {}
        self._through = f"{host}:{port}" if proxy else ""
        if not self._https:
            connection = http.client.HTTPConnection(host, port, timeout=timeout)
            if proxy:
                self._target, self._proxy_headers = f"http://{self._host_header}{self._path}", proxy[2]
        else:
            self._context = self._context or ssl.create_default_context()
            connection = http.client.HTTPSConnection(host, port, timeout=timeout, context=self._context)
            if proxy:
                connection.set_tunnel(self._host, self._port, headers=proxy[2])
                connection.response_class = lambda sock, method=None: self._response(  # type: ignore[assignment]
                    sock, deadline + self.dialer.looked_up_s, method
                )
        connection._create_connection = self.dialer.connect  # type: ignore[attr-defined]  # http.client's own place for another one
        try:
            connection.connect()
        except (OSError, http.client.HTTPException, ValueError):
            self._close(connection)  # a proxy may have taken it
            raise
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def _proxy(self) -> tuple[str, int, dict[str, str]] | None:
        """(host, port, headers) of the proxy that the environment names for this server, as curl reads it."""
        if self.loopback or urllib.request.proxy_bypass(self._host):
            return None
        address = urllib.request.getproxies().get("https" if self._https else "http", "")
        parts = urlsplit(address if "://" in address else f"http://{address}")
        if not parts.hostname:
            return None
        login = f"{unquote(parts.username or '')}:{unquote(parts.password or '')}".encode()
        headers = {"Proxy-Authorization": f"Basic {base64.b64encode(login).decode()}"} if parts.username else {}
        try:
            return parts.hostname, parts.port or 80, headers
        except ValueError:  # its own message may hold a piece of the password
            raise ValueError("the proxy that the environment names has no usable port") from None

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self._close(connection)

    def _close(self, connection: http.client.HTTPConnection) -> None:
        with contextlib.suppress(OSError):
            if connection.sock is not None and not self.dialer.is_ours:
                connection.sock.detach()
            connection.close()

    def abandon(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None and connection.sock is not None:
            with contextlib.suppress(OSError):
                connection.sock.detach()  # or the object closes, some day, whatever has that number by then
        self.dialer.forked()


class _DeadlineReader(io.RawIOBase):
    """What HTTPResponse wants of a socket, with a deadline."""

    def __init__(self, sock: socket.socket, deadline: float, transport: HttpTransport) -> None:
        self._sock, self._deadline, self._transport = sock, deadline, transport

    def makefile(self, _mode: str) -> io.BufferedReader:
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        while (left_s := self._deadline - self._transport.clock()) > 0:
            if not self._transport.dialer.is_ours:
                raise ConnectionAbortedError("the script has closed the socket")
            self._sock.settimeout(min(left_s, 0.25))
            with contextlib.suppress(TimeoutError):
                return self._sock.recv_into(buffer)
            if self._transport.idle is not None:
                self._transport.idle()
        raise TimeoutError("no whole answer within the deadline")
