"""The demo's server: the one that already runs here, or `perfagent up` as a process of its own for as long as the demo
lasts."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import httpx

from perfagent.endpoint.local_server import LocalServer, found_server
from perfagent.errors import PerfagentError, ResourceError
from perfagent_client.language import terminal_language
from perfagent_tools.demo.ranks import free_port

__all__ = ["DemoServer"]

DEFAULT_PORT = 8420
START_S = 60.0  # a first start imports FastAPI and Dash and makes the tables: seconds, more on a busy machine


class DemoServer:
    """A perfagent server on this machine, found or started; leaving the context stops it only if it was started here.

    data: the server's data folder, None for its own default; a server that runs on that folder is used. port: where to
    start one; None takes 8420, uses the perfagent server that listens there, and moves away from a port taken by
    anything else. Where neither is given, PERFAGENT_SERVER names the server, as it does for every other job. Raises
    PerfagentError when none answers there.
    """

    def __init__(self, *, data: Path | None = None, port: int | None = None, log: Path) -> None:
        self.log = log
        self._data = data
        self._process: subprocess.Popen[bytes] | None = None
        self.moved_from: int | None = None
        url = _named() if data is None and port is None else None
        url = url or (found_server() if data is None else LocalServer(data.expanduser()).address)
        if url is None and data is None and port is None and _is_ours(_local(DEFAULT_PORT)):
            url = _local(DEFAULT_PORT)
        self.found = url is not None
        if url is None:
            wanted = DEFAULT_PORT if port is None else port
            self._port = wanted if wanted != 0 and _is_free(wanted) else free_port()
            self.moved_from = wanted if wanted not in (0, self._port) else None
            url = _local(self._port)
        self.url = url
        key = os.environ.get("PERFAGENT_API_KEY")
        headers = {"Accept-Language": terminal_language()} | ({"Authorization": f"Bearer {key}"} if key else {})
        self.http = httpx.Client(base_url=self.url, timeout=10.0, trust_env=False, headers=headers)

    def __enter__(self) -> DemoServer:
        if not self.found:
            try:
                self._start()
            except BaseException:
                self.__exit__(None, None, None)
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.http.close()
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(timeout=15.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def get(self, path: str) -> Any:
        """The JSON below /api/v1, or None for what is not there (yet) or does not answer now."""
        with contextlib.suppress(httpx.HTTPError, ValueError):
            answer = self.http.get(f"/api/v1{path}")
            if answer.status_code == 200:
                return answer.json()
        return None

    def stopped(self) -> bool:
        """The server that was started here has ended by itself."""
        return self._process is not None and self._process.poll() is not None

    def _opened_log(self) -> IO[bytes]:
        try:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            return self.log.open("wb")
        except OSError as error:
            why = error.strerror or str(error)
            raise ResourceError(
                f"the log of the demo's server, {self.log}, cannot be written ({why}); set XDG_STATE_HOME to a folder that can be"
            ) from error

    def _start(self) -> None:
        command = [sys.executable, "-m", "perfagent", "up", "--host", "127.0.0.1", "--port", str(self._port)]
        if self._data is not None:
            command += ["--data", str(self._data)]
        with self._opened_log() as log:
            # A session of its own: Ctrl-C reaches the demo first, which stops the server when it is done with it.
            self._process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env=os.environ | {"PYTHONUNBUFFERED": "1"},
            )
        for _ in _until(START_S):
            if self.stopped():
                said = self.log.read_text("utf-8", "replace").strip()[-2000:]
                raise PerfagentError(f"the server did not start; it said:\n{said}")
            with contextlib.suppress(httpx.HTTPError):
                if self.http.get("/readyz").status_code == 200:
                    return
        raise PerfagentError(
            f"the server did not answer on {self.url}/readyz within {START_S:.0f} s; its log is {self.log}"
        )


def _until(seconds: float) -> Iterator[None]:
    """Yields about every 0.1 s until the time is over."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        yield
        time.sleep(0.1)


def _local(port: int) -> str:
    return f"http://127.0.0.1:{port}"


def _named() -> str | None:
    """The server that PERFAGENT_SERVER names; None where it names none. Another one is never taken in its place."""
    url = os.environ.get("PERFAGENT_SERVER", "").strip().rstrip("/")
    if not url:
        return None
    if not _is_ours(url):
        raise PerfagentError(
            f"no perfagent server answers at {url}, which PERFAGENT_SERVER names; unset it to start one here"
        )
    return url


def _is_ours(url: str) -> bool:
    """A perfagent server answers there: its OpenAPI document says so, and is readable by everybody."""
    try:
        document = httpx.get(f"{url}/openapi.json", timeout=5.0, trust_env=False)
        return document.status_code == 200 and "/api/v1/ingest" in document.json()["paths"]
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError):
        return False


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
