"""A small real HTTP server that takes frames as ours does (ledger included), or answers from a script, slowly, or not
at all."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any

from perfagent.wire import Frame, decode


@dataclass
class Scripted:
    """One answer of the script. body: bytes as they are; delay_s: before it; slow_s: between its bytes."""

    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b"{}"
    delay_s: float = 0.0
    slow_s: float = 0.0
    store: bool = False
    """Take the frame into the ledger although the answer does not say so (an answer that is lost on the way)."""
    cut: bool = False
    """Close the connection instead of answering."""


class IngestServer:
    """`with IngestServer() as server:` listens on a port of its own. script: answers to give first; `rule` decides per
    frame."""

    def __init__(
        self, *script: Scripted, port: int = 0, rule: Callable[[Frame], Scripted | None] | None = None
    ) -> None:
        self.script, self.rule = list(script), rule
        self.frames: list[Frame] = []
        self.stored: dict[tuple[str, int], Frame] = {}
        self.headers: list[dict[str, str]] = []
        self.received: list[float] = []
        self.connections = 0
        self.commands: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                outer.connections += 1
                super().setup()

            def do_POST(self) -> None:
                length = int(self.headers.get("Content-Length", 0))
                body = self.rfile.read(length)
                if len(body) < length:  # the other side closed in the middle
                    self.close_connection = True
                    return
                if self.headers.get("Content-Encoding") == "deflate":
                    body = zlib.decompress(body)
                answer = outer._answer(decode(body), {k.lower(): v for k, v in self.headers.items()})
                if answer.delay_s:
                    time.sleep(answer.delay_s)
                if answer.cut:
                    self.close_connection = True
                    return
                self.send_response(answer.status)
                for name, value in answer.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(answer.body)))
                self.end_headers()
                if not answer.slow_s:
                    self.wfile.write(answer.body)
                    return
                for byte in answer.body:
                    time.sleep(answer.slow_s)
                    self.wfile.write(bytes([byte]))
                    self.wfile.flush()

            def handle(self) -> None:
                try:
                    super().handle()
                except (ConnectionError, OSError):
                    return

            def log_message(self, *_: object) -> None:
                return

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

        self._server = Server(("127.0.0.1", port), Handler)
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)

    def _answer(self, frame: Frame, headers: dict[str, str]) -> Scripted:
        with self._lock:
            self.frames.append(frame)
            self.headers.append(headers)
            self.received.append(time.monotonic())
            answer = self.script.pop(0) if self.script else (self.rule(frame) if self.rule else None)
            if answer is not None and not answer.store:
                return answer
            key = frame.source, frame.seq
            fresh = key not in self.stored
            self.stored.setdefault(key, frame)
            if answer is not None:
                return answer
            samples = frame.samples
            commands, self.commands = self.commands, []
            reply = {
                "stored": samples if fresh else 0,
                "duplicate": 0 if fresh else samples,
                "rejected": [],
                "commands": commands,
            }
            return Scripted(headers={"Content-Type": "application/json"}, body=json.dumps(reply).encode())

    def __enter__(self) -> IngestServer:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    # ---- what was stored

    def values(self, name: str, *, source: str | None = None) -> dict[int, float]:
        """step -> value of a series over all stored frames; fails on a step that was stored twice."""
        found: dict[tuple[str, int], float] = {}
        for frame in sorted(self.stored.values(), key=lambda frame: (frame.source, frame.seq)):
            for group in frame.groups:
                if name in group.values and source in (None, frame.source):
                    for step, value in zip(group.steps(), group.column(name), strict=True):
                        assert (frame.source, step) not in found, f"{name} at step {step} was stored twice"
                        found[frame.source, step] = value
        return {step: value for (_, step), value in found.items()}

    def samples(self, name: str) -> list[float]:
        """All values of a series in the order of their frames; a sampler's series may have several at one step."""
        frames = sorted(self.stored.values(), key=lambda frame: (frame.source, frame.seq))
        return [
            value for frame in frames for group in frame.groups if name in group.values for value in group.column(name)
        ]

    def events(self, kind: str) -> list[dict[str, Any]]:
        frames = sorted(self.stored.values(), key=lambda frame: (frame.source, frame.seq))
        return [event.data for frame in frames for event in frame.events if event.kind == kind]

    def sources_that(self, state: str) -> set[str]:
        """The sources that told this state. One may tell it twice: if it learns its rank late, it repeats its last state."""
        return {
            frame.source
            for frame in list(self.stored.values())
            if any(event.kind == "state" and event.data["state"] == state for event in frame.events)
        }

    def states(self) -> list[str]:
        return [data["state"] for data in self.events("state")]


_PROCESS = """
import sys
from ingest_server import IngestServer
with IngestServer(port=int(sys.argv[1])) as server:
    print("ready", flush=True)
    for line in sys.stdin:
        print(*sorted(server.values("loss")), flush=True)
"""


class IngestProcess:
    """The server in a process of its own, so that it can be stopped."""

    def __init__(self, port: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _PROCESS, str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parent)},
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def steps(self) -> list[int]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return [int(word) for word in self.process.stdout.readline().split()]

    def end(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.communicate()
