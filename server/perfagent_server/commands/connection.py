"""How an administrator's command reaches the server: its address, and the admin token from the data folder."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from perfagent.command_line.option_types import add_server_options
from perfagent.endpoint.addresses import DEFAULT_SERVER, REFUSAL, refuses_plain_http, wrong_scheme
from perfagent.endpoint.admin_proof import AdminProof
from perfagent.endpoint.local_server import LocalServer, credentials, data_folder, server_address, stopped_server
from perfagent.errors import ConfigError, PerfagentError, ServerUnreachable
from perfagent.wire import plain

__all__ = ["AdminApi", "NotThere", "add_options", "no_server_is_meant"]

_TIMEOUT_S = 30.0
_CONFIDENTIAL = ("/users", "/channels")
"""What is sent there holds passwords, and addresses with tokens."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """--server, --data and --json, the same for every administrator's command."""
    add_server_options(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def no_server_is_meant(arguments: argparse.Namespace) -> bool:
    """Whether nobody named a server or gave a key, and none runs on the data folder: then the data folder itself is
    meant, and whoever answers at the default address is a stranger."""
    given = ("PERFAGENT_SERVER", "PERFAGENT_ADMIN_TOKEN", "PERFAGENT_API_KEY")
    if arguments.server is not None or (arguments.data is None and any(os.environ.get(name) for name in given)):
        return False
    return LocalServer(arguments.data.expanduser() if arguments.data else data_folder()).address is None


class NotThere(PerfagentError):  # noqa: N818 - it reads as what the server says
    """The server has nothing of that name."""


class _Object(dict[str, Any]):
    """Part of an answer. A field that it lacks means that another program answered."""

    def __init__(self, given: dict[str, Any], *, server: str) -> None:
        super().__init__(given)
        self._server = server

    def __missing__(self, name: str) -> Any:
        raise PerfagentError(
            f"what answers at {self._server} does not answer like a perfagent server: {name!r} is missing; name the server "
            "with --server"
        )


class AdminApi:
    """Requests with an administrator's rights, as far as this user has them (`credentials`)."""

    def __init__(self, server: str | None = None, data: Path | None = None) -> None:
        self.data = data.expanduser() if data else data_folder()
        # A folder that was named is that server's, whatever the environment says for training jobs.
        self.server = _address(server_address(server, data))
        key = credentials(self.server, self.data)
        self._auth = key.sign if isinstance(key, AdminProof) else None
        self._headers = {"Authorization": f"Bearer {key}"} if isinstance(key, str) else {}

    @classmethod
    def from_arguments(cls, arguments: argparse.Namespace) -> AdminApi:
        return cls(arguments.server, arguments.data)

    def request(self, method: str, path: str, body: Any = None) -> Any:
        """The answer's JSON, None for an empty one. path: below /api/v1. Raises PerfagentError with what the server
        said."""
        if body is not None and path.startswith(_CONFIDENTIAL) and self._auth is None and not self._headers:
            raise PerfagentError(
                f"this needs an administrator, and {self.server} is not asked without a key, since passwords and secrets "
                "go along: start your own server with `perfagent up`, or set PERFAGENT_API_KEY to an admin key"
            )
        with self._no_trouble():
            answer = httpx.request(
                method, self._url(path), json=plain(body), headers=self._headers, auth=self._auth, timeout=_TIMEOUT_S,
                trust_env=False,
            )  # fmt: skip
        self._check(answer)
        return self._json(answer) if answer.content else None

    def lines(self, path: str) -> Iterator[str]:
        """The lines of an answer, as they come. Raises as request does."""
        with (
            self._no_trouble(),
            httpx.stream(
                "GET", self._url(path), headers=self._headers, auth=self._auth, timeout=_TIMEOUT_S, trust_env=False
            ) as answer,
        ):
            if not answer.is_success:
                answer.read()
            self._check(answer)
            yield from answer.iter_lines()

    def _url(self, path: str) -> str:
        return f"{self.server}/api/v1{path}"

    @contextmanager
    def _no_trouble(self) -> Iterator[None]:
        """What comes in the way of an answer, in our words."""
        try:
            yield
        except httpx.InvalidURL as error:
            raise ConfigError(f"the server's address {self.server!r} cannot be used: {error}") from error
        except httpx.TransportError as error:
            hung_up = isinstance(error, (httpx.RemoteProtocolError, httpx.ReadError))
            if scheme := wrong_scheme(self.server, error, hung_up=hung_up):
                raise ServerUnreachable(scheme) from error
            start = stopped_server(self.server) or "start it with `perfagent up`, or name it with --server"
            raise ServerUnreachable(f"the server {self.server} does not answer ({error}); {start}") from error

    def _check(self, answer: httpx.Response) -> None:
        """Raises for an answer that is an error; its body must have been read."""
        if answer.is_success:
            return
        message = _message(answer)
        if answer.status_code == 404:
            raise NotThere(f"the server refused: {message}")
        wrong = answer.status_code in (400, 422)  # what was given, not who asked or what there is
        problem = (ConfigError if wrong else PerfagentError)(f"the server refused: {message}")
        problem.status = answer.status_code
        raise problem

    def _json(self, answer: httpx.Response) -> Any:
        try:
            said = answer.json(object_hook=lambda given: _Object(given, server=self.server))
        except ValueError:
            said = None
        if isinstance(said, dict):  # as every answer of ours is
            return said
        kind = answer.headers.get("content-type", "").partition(";")[0] or "no type"
        raise PerfagentError(
            f"what answers at {self.server} is no perfagent server: it sent {kind}, not JSON; name the server with --server"
        )


def _address(text: str) -> str:
    """A server's address, checked where it can still be told from a server that is down. Raises ConfigError."""
    address = text.strip().rstrip("/")
    try:
        url = httpx.URL(address)
    except httpx.InvalidURL as error:
        raise ConfigError(f"the server's address {text[:200]!r} cannot be used: {error}") from None
    if url.scheme not in ("http", "https") or not url.host:
        wanted = f"http://{address}" if url.scheme not in ("http", "https") and address.strip(":/") else DEFAULT_SERVER
        raise ConfigError(
            f"the server's address {text[:200]!r} must begin with http:// or https://, as in {wanted[:200]}"
        )
    return address


def _message(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        why = (
            REFUSAL
            if refuses_plain_http(answer.content)
            else f"; is {answer.request.url.netloc.decode()} a perfagent server?"
        )
        return f"status {answer.status_code}{why}"
