"""A server of the benchmark's own: `perfagent up` in a process with data that goes with it, and what that process takes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import psutil

from perfagent.endpoint.local_server import ADDRESS_FILE
from perfagent.errors import ResourceError, how_to_install

__all__ = ["OwnServer", "own_server"]

_STARTS_WITHIN_S = 60.0
_LOOKS_EVERY_S = 0.5


class OwnServer:
    """url: where it listens. peak_rss_bytes: the most memory that it was seen with."""

    def __init__(self, process: subprocess.Popen[bytes], url: str) -> None:
        self.url = url
        self.peak_rss_bytes = 0
        self._process = psutil.Process(process.pid)
        self._looking = threading.Thread(target=self._look, daemon=True)
        self._looking.start()

    def cpu_s(self) -> float:
        """That it has taken so far. Raises ResourceError when it has ended."""
        try:
            return float(sum(self._process.cpu_times()[:2]))
        except psutil.NoSuchProcess:
            raise ResourceError("the server that the benchmark started has ended in the middle of it") from None

    def _look(self) -> None:
        with contextlib.suppress(psutil.Error):
            while True:
                self.peak_rss_bytes = max(self.peak_rss_bytes, self._process.memory_info().rss)
                time.sleep(_LOOKS_EVERY_S)


@contextlib.contextmanager
def own_server(database: str | None = None) -> Iterator[OwnServer]:
    """A server on a free port, gone at the end with all its data (but not with what it put into `database`). Raises
    ResourceError if it does not start."""
    if find_spec("perfagent_server") is None or find_spec("fastapi") is None:
        raise ResourceError(
            f"this starts a server, which is not installed here; {how_to_install('server')}, or give --url"
        )
    with tempfile.TemporaryDirectory(prefix="perfagent-bench-") as folder:
        data = Path(folder) / "data"
        # thousands of runs begin at once, all from here
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PERFAGENT_")}
        environment["PERFAGENT_RUNS_PER_HOUR"] = "inf"
        arguments = ["up", "--port", "0", "--data", str(data), *(["--database", database] if database else [])]
        with (Path(folder) / "log").open("w+b") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "perfagent", *arguments], env=environment, stdout=log, stderr=log,
                stdin=subprocess.DEVNULL,
            )  # fmt: skip
            try:
                yield OwnServer(process, _address(process, data / ADDRESS_FILE, Path(folder) / "log"))
            finally:
                process.terminate()
                try:
                    process.wait(timeout=20)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def _address(process: subprocess.Popen[bytes], file: Path, log: Path) -> str:
    """Where the server says that it listens. The socket is bound before the file is written, so requests wait there."""
    end = time.monotonic() + _STARTS_WITHIN_S
    while process.poll() is None and time.monotonic() < end:
        with contextlib.suppress(OSError):
            if address := file.read_text("utf-8").partition("\n")[0].strip():
                return address
        time.sleep(0.05)
    said = " ".join(log.read_text("utf-8", "replace").split())[-500:]
    raise ResourceError(f"the server did not start: {said or 'it said nothing'}")
