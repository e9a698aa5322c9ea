"""Lets one server in: on a data folder, and on a database. Two would judge every run twice, and each would believe its
own caches. The locks end with the process, however it ends."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path

from perfagent.endpoint.local_server import ADDRESS_FILE
from perfagent.errors import ResourceError
from perfagent_server.ownership import give_to_owner_of
from perfagent_server.settings import Settings

__all__ = ["LOCK_FILE", "only_server"]

LOCK_FILE = "server.lock"


@contextlib.contextmanager
def only_server(settings: Settings) -> Iterator[None]:
    """Holds the data folder and the SQLite file; PostgreSQL has a lock of its own (database/postgresql.py). Raises
    ResourceError that says who holds them, and what to do."""
    # late: `perfagent up` looks at its port before it loads SQLAlchemy
    from perfagent_server.database import is_sqlite, sqlite_path

    data = settings.data
    with contextlib.ExitStack() as held:
        held.enter_context(
            _held(data / LOCK_FILE, f"the data folder {data}", settings, "choose another folder with --data")
        )
        if is_sqlite(settings):
            database = sqlite_path(settings).resolve()
            file, what = database.with_name(f"{database.name}.lock"), f"the database {database}"
            held.enter_context(_held(file, what, settings, "choose another with --database"))
        yield


@contextlib.contextmanager
def _held(file: Path, what: str, settings: Settings, otherwise: str) -> Iterator[None]:
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        why = "it is a file" if file.parent.is_file() else error.strerror
        raise ResourceError(f"{what} cannot be written ({why}); {otherwise}") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ResourceError(
                f"a server runs on {what} already{_holder(descriptor)}; stop it, or {otherwise}"
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps({"process": os.getpid(), "data": str(settings.data.resolve())}).encode(), 0)
        give_to_owner_of(file.parent, descriptor)  # a command of root must not lock the service out
        yield
    finally:
        os.close(descriptor)


def _holder(descriptor: int) -> str:
    """Who holds a lock, as far as its file tells: its process, data folder and address."""
    try:
        said = json.loads(os.pread(descriptor, 10_000, 0))
        process, data = int(said["process"]), Path(said["data"])
    except (ValueError, KeyError, TypeError):  # an older version's, or not written yet
        return ""
    address = data / ADDRESS_FILE
    where = f", {address.read_text().splitlines()[0]}" if address.exists() else ""
    return f" (process {process}, data folder {data}{where})"
