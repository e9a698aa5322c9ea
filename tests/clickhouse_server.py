"""A real ClickHouse engine for tests that run with --clickhouse: the server that PERFAGENT_TEST_CLICKHOUSE names
(clickhouse://user:password@host:8123), or chdb behind a small endpoint, started here (clickhouse_engine.py).

Each data folder has its own database, dropped when its module of tests ends.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

VARIABLE = "PERFAGENT_TEST_CLICKHOUSE"
_made: set[str] = set()


class Engine:
    """chdb as a server of its own on a folder. port: 0 is any free one."""

    def __init__(self, folder: Path, port: int = 0) -> None:
        command = [sys.executable, str(Path(__file__).with_name("clickhouse_engine.py")), str(folder), str(port)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the ClickHouse engine did not start: is chdb there? scripts/install --all installs it")
        self.port = int(line)

    @property
    def url(self) -> str:
        return f"clickhouse://default@127.0.0.1:{self.port}"

    def stop(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()


def start() -> Callable[[], object]:
    """Starts an engine unless a server is named, and names it for this process and its children. What is returned stops
    it."""
    if os.environ.get(VARIABLE):
        return lambda: None
    folder = Path(tempfile.mkdtemp(prefix="perfagent-clickhouse-"))
    engine = Engine(folder)
    os.environ[VARIABLE] = engine.url

    def stop() -> None:
        engine.stop()
        shutil.rmtree(folder, ignore_errors=True)

    return stop


def is_wanted() -> bool:
    return bool(os.environ.get(VARIABLE))


def address_of(folder: Path) -> str:
    """The URL of a data folder's samples; the same one each time."""
    name = f"perfagent_{sha256(str(folder).encode()).hexdigest()[:24]}"
    _made.add(name)
    return f"{os.environ[VARIABLE]}/{name}"


def drop_all() -> None:
    while _made:
        ask(f"DROP DATABASE IF EXISTS {_made.pop()}")


def ask(statement: str) -> object:
    """Runs a statement on the server; answers the one value that it gives."""
    from perfagent_server.store.clickhouse.connection import Address, ClickHouse

    server = ClickHouse(Address.parse(os.environ[VARIABLE]))
    try:
        return server.run(statement)
    finally:
        server.close()
