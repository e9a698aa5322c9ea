"""What tests of several parts build: a real server process, a local webhook receiver, a wait for a condition.

Functions are added here, never renamed: every folder of tests leans on them.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import forked_servers
import httpx
from data_folder import place_of

T = TypeVar("T")

STARTS_WITHIN_S = 60.0  # a first start makes the tables and imports everything, on a busy machine


def until(
    condition: Callable[[], T], *, within_s: float = 20.0, every_s: float = 0.02, why: str = "the condition never held"
) -> T:
    """The first truthy result of the condition. Fails the test after within_s."""
    end = time.monotonic() + within_s
    while True:
        result = condition()
        if result:
            return result
        if time.monotonic() > end:
            raise AssertionError(f"{why} (waited {within_s:.0f} s)")
        time.sleep(every_s)


@functools.cache
def web() -> httpx.Client:
    """Asks servers under test. `httpx.get` reads the machine's certificates for each request: 60 ms of CPU, and tests
    poll. No connection stays open: servers are stopped and killed here."""
    return httpx.Client(trust_env=False, timeout=30.0, limits=httpx.Limits(max_keepalive_connections=0))


PORTS_OF_A_WORKER = 4000


@functools.cache
def _ports() -> Iterator[int]:
    """A range for each pytest worker, below the kernel's ephemeral ports. So no other process takes a port between
    `free_port()` and its use."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 5
    first = 12_000 + worker * PORTS_OF_A_WORKER
    return itertools.cycle(first + (os.getpid() + at) % PORTS_OF_A_WORKER for at in range(PORTS_OF_A_WORKER))


def free_port() -> int:
    for port in _ports():
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("the ports never end")


def sync(environment: Mapping[str, str]) -> None:
    """Runs `perfagent sync`, which sends the frames that a job has left. At its end a job sends for 1.5 s only."""
    command = [sys.executable, "-m", "perfagent", "sync"]
    subprocess.run(command, env=environment, check=True, capture_output=True, timeout=120)


def run_job(script: str, folder: Path, server: str, *words: str) -> str:
    """What a script says that sends to this server; everything it has sent is there afterwards."""
    (folder / "train.py").write_text(script)
    variables = job_environment(folder, PERFAGENT_SERVER=server, OMP_NUM_THREADS="1")
    command = [sys.executable, str(folder / "train.py"), *words]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    sync(variables)
    return done.stdout


def job_environment(folder: Path, **more: str) -> dict[str, str]:
    """The environment of a program under test: nothing of ours from outside, data and spool below `folder`."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PERFAGENT_")}
    home = folder / "home"
    home.mkdir(parents=True, exist_ok=True)
    return (
        clean
        | {
            "HOME": str(home),
            "XDG_DATA_HOME": str(folder / "data"),
            "XDG_STATE_HOME": str(folder / "state"),
            "PYTHONUNBUFFERED": "1",
        }
        | more
    )


@dataclass
class ServerProcess:
    """A real `perfagent up` with a data folder of its own. `start` after `kill` takes the same port and data.

    forked: see forked_servers.py; False for the command as people start it.
    """

    folder: Path
    port: int = field(default_factory=free_port)
    env: Mapping[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    process: subprocess.Popen[bytes] | forked_servers.Forked | None = None
    forked: bool = True

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        return (self.folder / "server.log").read_text("utf-8", "replace")

    def start(self, *, wait: bool = True) -> ServerProcess:
        self.folder.mkdir(parents=True, exist_ok=True)
        arguments = ["up", "--port", str(self.port), "--data", str(self.folder / "server-data"), *self.options]
        environment, log = job_environment(self.folder, **self.env), self.folder / "server.log"
        if self.forked:
            place = place_of(self.folder / "server-data")
            for name in ("database", "metrics"):
                if place[name] is not None:
                    environment.setdefault(f"PERFAGENT_{name.upper()}", place[name])
            self.process = forked_servers.fork(arguments, environment, log)
        else:
            with log.open("ab") as output:
                self.process = subprocess.Popen(
                    [sys.executable, "-m", "perfagent", *arguments], stdout=output, stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL, env=environment,
                )  # fmt: skip
        if wait:
            until(self.ready, within_s=STARTS_WITHIN_S, why=f"the server did not answer on {self.url}/readyz")
        return self

    def ready(self) -> bool:
        if self.process is not None and self.process.poll() is not None:
            raise AssertionError(f"the server ended with {self.process.returncode}:\n{self.log[-3000:]}")
        try:
            return web().get(f"{self.url}/readyz", timeout=5.0).status_code == 200
        except httpx.TransportError:
            return False

    def get(self, path: str, **params: Any) -> Any:
        """The JSON below /api/v1. Raises httpx.HTTPStatusError for anything but success."""
        answer = web().get(f"{self.url}/api/v1{path}", params=params)
        answer.raise_for_status()
        return answer.json()

    def find(self, path: str, **params: Any) -> Any:
        """The JSON below /api/v1, or None for what is not there or does not answer."""
        with contextlib.suppress(httpx.HTTPError):
            return self.get(path, **params)
        return None

    @property
    def admin_token(self) -> str:
        """The token in the data folder."""
        return (self.folder / "server-data" / "admin-token").read_text("utf-8").strip()

    def admin(self, method: str, path: str, body: Any = None) -> Any:
        """An administrator's request below /api/v1; its JSON, or None for an empty answer."""
        answer = web().request(
            method,
            f"{self.url}/api/v1{path}",
            json=body,
            headers={"Authorization": f"Bearer {self.admin_token}"},
        )
        assert answer.is_success, f"{method} {path}: {answer.status_code} {answer.text[:500]}"
        return answer.json() if answer.content else None

    def export(self, run: str) -> list[dict[str, Any]]:
        """Every sample of a run, as the JSON lines of the export have them."""
        answer = web().get(f"{self.url}/api/v1/runs/{run}/export", params={"format": "jsonl"}, timeout=60.0)
        answer.raise_for_status()
        return [json.loads(line) for line in answer.text.splitlines() if line]

    def wait_for_state(self, run: str, *states: str, within_s: float = 30.0) -> dict[str, Any]:
        """The run's summary once its state is one of `states`."""

        def reached() -> dict[str, Any] | None:
            summary = self.find(f"/runs/{run}")
            return summary if summary is not None and summary["state"] in states else None

        try:
            return until(reached, within_s=within_s, every_s=0.1)
        except AssertionError:
            raise AssertionError(
                f"run {run} is not {' or '.join(states)} after {within_s:.0f} s but {self.find(f'/runs/{run}')}"
            ) from None

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, and waits until it is gone."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(timeout=10)

    def stop(self) -> None:
        """SIGTERM; SIGKILL if that does not end it."""
        if self.process is None or self.process.poll() is not None:
            return
        self.signal(signal.SIGCONT)
        self.process.terminate()
        try:
            self.process.wait(timeout=15)
        except subprocess.TimeoutExpired:
            self.kill()


@contextlib.contextmanager
def server_process(folder: Path, *options: str, **env: str) -> Iterator[ServerProcess]:
    """A running server; `env` are variables such as PERFAGENT_WEBHOOK_ALLOW."""
    server = ServerProcess(folder, env=env, options=options)
    try:
        yield server.start()
    finally:
        server.stop()


@dataclass
class Delivery:
    """One request that a receiver got. received: Unix seconds; status: what it was answered."""

    headers: dict[str, str]
    body: bytes
    received: float
    status: int

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Receiver:
    """A local webhook receiver. answer(n) is the status for the n-th request, counted from 1; 200 unless told
    otherwise. got(n), answered(n): called when the n-th request is here, and when it was answered. port: 0 for any."""

    def __init__(
        self, answer: Callable[[int], int] = lambda _: 200, *, got: Callable[[int], None] = lambda _: None,
        answered: Callable[[int], None] = lambda _: None, port: int = 0,
    ) -> None:  # fmt: skip
        self.deliveries: list[Delivery] = []
        self._lock = threading.Lock()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                with receiver._lock:
                    number = len(receiver.deliveries) + 1
                    status = answer(number)
                    headers = {name.lower(): value for name, value in self.headers.items()}
                    receiver.deliveries.append(Delivery(headers, body, time.time(), status))
                got(number)
                with contextlib.suppress(OSError):  # whoever asked is gone
                    self.send_response(status)
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    self.wfile.flush()
                answered(number)

            def log_message(self, *arguments: Any) -> None: ...

        self._http = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """host:port, as PERFAGENT_WEBHOOK_ALLOW takes it."""
        return f"127.0.0.1:{self._http.server_port}"

    @property
    def url(self) -> str:
        return f"http://{self.address}/hook"

    def of_type(self, kind: str) -> list[Delivery]:
        return [delivery for delivery in list(self.deliveries) if delivery.json.get("type") == kind]

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join(timeout=5)

    def __enter__(self) -> Receiver:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class RecordingSender:
    """Stands where the agent's sender stands and keeps what the training thread handed over. Nothing is sent, no thread
    runs."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        from perfagent.agent_config import AgentConfig
        from perfagent.decode.step_decoder import StepReader
        from perfagent.identity import Identity

        self.config = AgentConfig(state_dir=folder / "state", **settings)
        self.identity = Identity(project=self.config.project, run="recorded", attempt=1)
        self.folder = folder
        self.rows: deque[Any] = deque()
        self._events: list[tuple[str, Any, int | None]] = []
        self.counters: dict[str, int] = {}
        self.reader = StepReader()
        self.logged = [0, 0, 0, 0]
        self.progress: Any = None
        self.sources: list[Callable[[], None]] = []
        self.imports: list[str] = []
        self.on_command: list[Callable[[Mapping[str, Any]], None]] = []
        self.disabled, self.cpu_s, self.asked_cpu_s = False, 0.0, 0.0
        self.closing_at: float | None = None
        self.clock = time.monotonic
        self.closed = threading.Event()
        self.spool = SimpleNamespace(backlog=False)
        self.ended: dict[str, Any] | None = None

    def start(self) -> None: ...

    def tell(self, topic: str, level: int, message: str) -> None: ...

    def event(self, kind: str, data: Any, *, step: int | None = None) -> None:
        self._events.append((kind, data, step))

    @property
    def events(self) -> list[tuple[str, dict[str, Any], int | None]]:
        self._events[:] = [(kind, data() if callable(data) else data, step) for kind, data, step in self._events]
        return self._events

    def add_source(self, poll: Callable[[], None], *, every_s: float = 0.0) -> None:
        self.sources.append(poll)

    def add_slow_source(self, poll: Callable[[], bool | None], *, every_s: float = 0.5) -> None: ...

    def close(self, state: str, reason: str = "", timeout_s: float = 1.5, **more: Any) -> None:
        self.ended = {"state": state, "reason": reason, **more}
        self.disabled = True
        self.closed.set()

    def drain(self) -> list[tuple[int, dict[str, Any]]]:
        """(step, values) of every row that is ready, in order; a row that is not stays."""
        from perfagent.decode.finished_steps import is_ready, row_of
        from perfagent.step.row import StepRow

        ready = []
        while self.rows:
            head = self.rows[0]
            is_step = isinstance(head, StepRow)
            if type(head) is not tuple and not (
                is_ready(self.progress, self.reader, head) if is_step else head.ready()
            ):
                break
            self.rows.popleft()
            row = head if type(head) is tuple else row_of(self.progress, self.reader, head) if is_step else head.row()
            ready.append((row[0], dict(row[3]) if len(row) == 4 else dict(zip(row[3], row[4], strict=True))))
        return ready
