"""Reads a SQLite database of another program without writing to its folder.

A truncated database is read up to its first missing page (format: https://sqlite.org/fileformat2.html).
"""

from __future__ import annotations

import re
import sqlite3
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from perfagent.wire.quantities import some
from perfagent_client.history.old_run import OldRun

__all__ = ["rows", "runs_of", "tables", "with_logs"]

_LOGS = ("-wal", "-shm", "-journal")
_DAMAGED = (sqlite3.DatabaseError, UnicodeDecodeError)  # the latter for names of columns


def tables(path: Path) -> dict[str, str]:
    """Each table's name and definition; of a damaged file those that its beginning shows, and nothing of any other file."""
    try:
        if _head(path, 16) != b"SQLite format 3\0":
            return {}
        with _opened(path, []) as database:
            found = database.execute("SELECT name, sql FROM sqlite_master WHERE type = 'table'")
            return {str(name): str(definition) for name, definition in found}
    except _DAMAGED:
        matches = re.finditer(rb"CREATE TABLE [\"`]?(\w+)[\"`]? \([^\0]*", _head(path, 1 << 20))
        return {match[1].decode(): match[0].decode(errors="replace") for match in matches}
    except OSError:
        return {}


def with_logs(path: Path, files: Sequence[Path]) -> tuple[Path, ...]:
    """The database and its logs: what a writer has not moved into it yet."""
    return (path, *(one for end in _LOGS if (one := path.with_name(path.name + end)) in files))


def runs_of(
    path: Path, tracker: str, read: Callable[[sqlite3.Connection, list[str]], Iterator[OldRun]]
) -> Iterator[OldRun]:
    """What `read` finds in the database; where it finds nothing and something is wrong, a run that says what.

    read: gets a list of sentences about the whole file, for the first run that it finds.
    """
    left_out: list[str] = []
    found = 0
    try:
        with _opened(path, left_out) as database:
            for run in read(database, left_out):
                found += 1
                yield run
    except _DAMAGED as error:
        left_out.append(f"{path.name} cannot be read: {error}")
    if left_out and not found:
        yield OldRun(f"{tracker}:{path}", path.stem, left_out=left_out)


@contextmanager
def _opened(path: Path, left_out: list[str]) -> Iterator[sqlite3.Connection]:
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        closing(_connected(path, Path(folder), left_out)) as database,
    ):
        database.text_factory = lambda text: text.decode(errors="replace")
        yield database


def rows(
    database: sqlite3.Connection, statement: str, left_out: list[str], **values: object
) -> Iterator[tuple[object, ...]]:
    """What is whole of an answer, and a sentence for the rest."""
    count = 0
    try:
        for row in database.execute(statement, values):
            yield row
            count += 1
    except _DAMAGED as error:
        table = statement.rpartition(" FROM ")[2].split()[0]
        left_out.append(f"the table {table} is damaged after {some(count, 'row')}: {error}")


def _connected(path: Path, folder: Path, left_out: list[str]) -> sqlite3.Connection:
    wal, shared, journal = (path.with_name(path.name + end) for end in _LOGS)
    if wal.exists() and not shared.exists():
        return _copied(path, folder)
    if not wal.exists() and not journal.exists():
        head, size = _head(path, 100).ljust(100, b"\0"), path.stat().st_size
        page = int.from_bytes(head[16:18]) or 512
        page = 65536 if page == 1 else page
        pages = int.from_bytes(head[28:32]) if head[24:28] == head[92:96] else -(-size // page)
        if size < page * pages:
            left_out.append(f"the last {some(page * pages - size, 'byte')} of {path.name} are missing")
            return _copied(path, folder, size - size % page)
        if (
            head[18:20] == b"\2\2"
        ):  # a database with a write-ahead log: nobody has it open, and SQLite would leave two files beside it
            return _connect(path, "immutable=1")
    try:
        return _connect(path, "mode=ro")
    except sqlite3.OperationalError:  # its writer was killed in a transaction, which must be rolled back
        return _copied(path, folder)


def _connect(path: Path, how: str) -> sqlite3.Connection:
    database = sqlite3.connect(f"{path.resolve().as_uri()}?{how}", uri=True, isolation_level=None)
    try:
        database.execute("PRAGMA writable_schema = ON")  # a file that is shorter than its header says is opened
        database.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except sqlite3.DatabaseError:
        database.close()
        raise
    return database


def _copied(path: Path, folder: Path, size: int | None = None) -> sqlite3.Connection:
    """size: bytes of the whole pages. Half a page has zeros where values were, and SQLite would believe them."""
    for end in ("-wal", "-journal", ""):
        beside = path.with_name(path.name + end)
        if beside.exists():
            (folder / f"copy{end}").write_bytes(beside.read_bytes())
    if size is not None:
        with (folder / "copy").open("rb+") as file:
            file.truncate(size)
    return _connect(folder / "copy", "mode=rw")


def _head(path: Path, size: int) -> bytes:
    with path.open("rb") as file:
        return file.read(size)
