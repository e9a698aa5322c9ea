"""A server's data folder with its tables made: a copy of one that was made once, for a tenth of the time of the
migrations.

For tests of what a server does, not of its first start: tests/server/store/test_database.py and every `perfagent up`
make theirs.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import shutil
import sqlite3
import tempfile
from pathlib import Path
from types import SimpleNamespace

from perfagent_server.database import open_database

__all__ = ["data_folder"]

NAME = "perfagent.db"


def data_folder(folder: Path) -> Path:
    """The folder, with an empty database of this version unless it has one."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not (folder / NAME).exists():
        shutil.copy(_made_once(), folder / NAME)  # with its mode, 0600
    return folder


@functools.cache
def _made_once() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="perfagent-tests-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    open_database(SimpleNamespace(data=folder / "first", database=None), reserve_bytes=1 << 12).close()
    copy = folder / NAME
    copy.touch(mode=0o600)
    source, target = sqlite3.connect(folder / "first" / NAME), sqlite3.connect(copy)
    with contextlib.closing(source), contextlib.closing(target):
        source.backup(target)  # whole, whatever is still in the log
    return copy
