"""`perfagent up`, forked from a process that has imported the server once: five seconds of CPU of each start.

For tests of what a server does. tests/server/api/test_commands.py has one that starts as people start it.

As a program: a line of JSON in: {"arguments": [...], "environment": {...}, "log": ...}; a process that runs this
command, and its process id out. When it ends, its exit code is in the file LOG.exit-PID. Ends at the end of its input.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

__all__ = ["Forked", "fork"]


class Forked:
    """A process that was forked, as far as tests use subprocess.Popen."""

    def __init__(self, pid: int, code: Path) -> None:
        self.pid, self._code = pid, code
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None and self._code.exists():
            self.returncode = int(self._code.read_text())
        return self.returncode

    def wait(self, timeout: float = 60.0) -> int:
        """Raises subprocess.TimeoutExpired."""
        end = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("perfagent up", timeout)
            time.sleep(0.005)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended just now
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


def fork(arguments: list[str], environment: dict[str, str], log: Path) -> Forked:
    """A process that runs `perfagent ARGUMENTS`; what it says is added to the log."""
    parent = _parent()
    assert parent.stdin is not None
    assert parent.stdout is not None
    print(
        json.dumps({"arguments": arguments, "environment": environment, "log": str(log)}), file=parent.stdin, flush=True
    )
    pid = int(parent.stdout.readline())
    return Forked(pid, _code_file(log, pid))


def _code_file(log: Path, pid: int) -> Path:
    return log.with_name(f"{log.name}.exit-{pid}")


@functools.cache
def _parent() -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PERFAGENT_")}
    parent = subprocess.Popen(
        [sys.executable, __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        process_group=0,
        env=environment,
    )
    atexit.register(_end, parent)
    return parent


def _end(parent: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(parent.pid, signal.SIGKILL)  # and what it has forked
    parent.communicate()


# ---- in the process that forks


def _become(wanted: dict[str, Any]) -> None:
    """In the fork: runs the command. The process then ends as any does."""
    from perfagent import cli

    log = os.open(wanted["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.environ.clear()
    os.environ.update(wanted["environment"])
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr] - as PYTHONUNBUFFERED would
    sys.argv = ["perfagent", *wanted["arguments"]]
    cli.main(wanted["arguments"])


def _load() -> None:
    """All that a server imports and makes once in a process, up to its first answer."""
    import cheap_passwords
    from fastapi.testclient import TestClient

    import perfagent_dashboard.app  # noqa: F401 - what `perfagent up` imports
    import perfagent_server.commands.up
    import perfagent_server.serving  # noqa: F401
    from perfagent_server import schema
    from perfagent_server.app import create_app
    from perfagent_server.settings import Settings

    cheap_passwords.use()
    schema.head()
    with tempfile.TemporaryDirectory() as folder:
        app = create_app(Settings(data=Path(folder)), dashboard=False)
        TestClient(app, base_url="http://127.0.0.1:8420", raise_server_exceptions=False).get("/api/v1/nothing")


def main() -> None:
    _load()
    gc.freeze()
    children: dict[int, tuple[int, Path]] = {}  # the descriptor of a process -> its id and the file for its exit code
    given = b""
    while True:
        ready, _, _ = select.select([0, *children], [], [])
        for descriptor in set(ready) & set(children):
            pid, code = children.pop(descriptor)
            os.close(descriptor)
            ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            with contextlib.suppress(FileNotFoundError):  # the test is over, and its folder gone
                written = code.with_suffix(".part")
                written.write_text(str(ended))
                written.rename(code)
        if 0 in ready:
            piece = os.read(0, 1 << 16)
            if not piece:
                return
            *lines, given = (given + piece).split(b"\n")
            for line in lines:
                wanted = json.loads(line)
                pid = os.fork()
                if not pid:
                    for descriptor in children:
                        os.close(descriptor)
                    _become(wanted)
                    return
                children[os.pidfd_open(pid)] = pid, _code_file(Path(wanted["log"]), pid)
                print(pid, flush=True)


if __name__ == "__main__":
    main()
