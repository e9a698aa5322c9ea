"""Backups: one SQLite file that holds a whole database, SQLite's or PostgreSQL's, and the small files of the data folder
without which a restored server would know no key.

A backup of SQLite is a copy of its pages by SQLite's online backup. One of PostgreSQL is a copy of its rows, all of one
moment. Both are taken while the server writes. The files of the data folder lie in a table of their own, which exists in
backups only. pg_dump is not used: it is often not on the server's machine, and must be as new as the database.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from perfagent.errors import ResourceError
from perfagent_server.database import Database, DatabaseSettings, is_sqlite, open_database, open_to_read, sqlite_path
from perfagent_server.ownership import give_to_owner_of
from perfagent_server.store.copying import copy_all
from perfagent_server.store.tables import metadata

__all__ = ["Restored", "back_up", "restore"]

_FILES_TABLE = "data_folder_file"
_SMALL_RESERVE_BYTES = 1 << 16  # of a database that exists for a copy only


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What a restore did. kept: the files that it moved aside; files: names of those that it wrote into the data folder."""

    kept: list[Path]
    files: list[str]


def back_up(settings: DatabaseSettings, target: Path, names: Sequence[str]) -> list[str]:
    """Writes a backup into a new file, mode 0600, and answers which of the data folder's files it holds. names: the files to
    take along, where they exist. Raises ResourceError."""
    try:
        os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    except FileExistsError:
        raise ResourceError(f"{target} exists; give the name of a new file") from None
    except OSError as error:
        raise ResourceError(f"{target} cannot be written ({error.strerror})") from error
    try:
        if is_sqlite(settings):
            _copy_pages(_existing(sqlite_path(settings)), target)
        else:
            _copy_rows(settings, target)
        return _put_files(target, settings.data, names)
    except BaseException:
        target.unlink(missing_ok=True)
        raise


def restore(settings: DatabaseSettings, source: Path, *, replace: bool) -> Restored:
    """Restores a backup into the database that the settings name. No server may run on that database. If root restores, the
    files get the owner of the folder. replace: a SQLite database that is there is moved aside. A PostgreSQL database must be
    empty. Raises ResourceError; then nothing was changed."""
    _check(source)
    settings.data.mkdir(parents=True, exist_ok=True, mode=0o700)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    if is_sqlite(settings):
        place = sqlite_path(settings)
        place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not replace:
            _refuse_data(place)
        with _current_copy(source, place.parent) as (copy, files):
            kept = _swap(copy, place, stamp)
    else:
        if replace:
            raise ResourceError(
                "--replace is for SQLite, whose old file is moved aside; make an empty PostgreSQL database and name that"
            )
        with _current_copy(source, settings.data) as (copy, files):
            _copy_into(settings, copy)
        kept = []
    written, aside = _write_files(settings.data, files, stamp)
    return Restored(kept=kept + aside, files=written)


# --- backup -----------------------------------------------------------------------------------------------------------


def _existing(file: Path) -> Path:
    if not file.exists():
        raise ResourceError(f"there is no database at {file}; name its folder with --data")
    return file


def _copy_pages(source: Path, target: Path) -> None:
    """SQLite's online backup: a consistent copy while others write."""
    try:
        with contextlib.closing(sqlite3.connect(f"{source.resolve().as_uri()}?mode=ro", uri=True, timeout=30)) as old, \
             contextlib.closing(sqlite3.connect(target)) as new:  # fmt: skip
            old.backup(new)
            new.execute("PRAGMA journal_mode=DELETE")  # one file, not three
    except sqlite3.Error as error:
        raise ResourceError(f"{source} could not be copied to {target} ({error})") from error


def _copy_rows(settings: DatabaseSettings, target: Path) -> None:
    """The rows of a PostgreSQL database, all of one moment."""
    with contextlib.closing(open_to_read(settings)) as source, _workshop(target.parent) as folder:
        made = _own(folder / "copy.db")
        with contextlib.closing(made):
            copy_all(source, made)
        _copy_pages(folder / "copy.db", target)


def _put_files(target: Path, folder: Path, names: Sequence[str]) -> list[str]:
    found = [name for name in names if (folder / name).is_file()]
    with contextlib.closing(sqlite3.connect(target)) as connection, connection:
        connection.execute(f"CREATE TABLE {_FILES_TABLE} (name TEXT PRIMARY KEY, content BLOB NOT NULL)")
        connection.executemany(
            f"INSERT INTO {_FILES_TABLE} VALUES (?, ?)",  # noqa: S608 - our own name
            [(name, (folder / name).read_bytes()) for name in found],
        )
    return found


# --- restore ----------------------------------------------------------------------------------------------------------


def _check(file: Path) -> None:
    if not file.is_file():
        raise ResourceError(f"there is no file {file}")
    try:
        with contextlib.closing(sqlite3.connect(f"{file.resolve().as_uri()}?mode=ro", uri=True)) as connection:
            verdict = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
            ours = connection.execute("SELECT count(*) FROM sqlite_master WHERE name = 'alembic_version'").fetchone()[0]
    except sqlite3.Error as error:
        raise ResourceError(f"{file} is no database ({error}); give a file that `perfagent db backup` made") from error
    if verdict != "ok" or not ours:
        raise ResourceError(f"{file} is damaged or not ours ({verdict}); give a file that `perfagent db backup` made")


def _refuse_data(file: Path) -> None:
    """Raises ResourceError where a database has rows. One that cannot be read may have some."""
    if not file.exists() or file.stat().st_size == 0:
        return
    told = f"{file} has data; --replace puts the backup in its place and moves the old file aside"
    try:
        with contextlib.closing(sqlite3.connect(f"{file.resolve().as_uri()}?mode=ro", uri=True)) as connection:
            tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            for table in metadata.tables.keys() & tables:
                if connection.execute(f"SELECT 1 FROM {table} LIMIT 1").fetchone():  # noqa: S608 - a name of ours
                    raise ResourceError(told)
    except sqlite3.Error as error:
        raise ResourceError(f"{told} ({error})") from error


@contextlib.contextmanager
def _current_copy(source: Path, room: Path) -> Iterator[tuple[Path, dict[str, bytes]]]:
    """A copy of the backup at this version's schema, in a folder below `room`, and the files that lay in it. Raises
    ResourceError for a backup of a newer version."""
    with _workshop(room) as folder:
        copy = folder / "copy.db"
        os.close(os.open(copy, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        _copy_pages(source, copy)
        files = _take_files(copy)
        _own(copy).close()  # upgrades an older backup, and refuses a newer one with a sentence
        yield copy, files


def _take_files(copy: Path) -> dict[str, bytes]:
    """Empty for backups of older versions, which have none."""
    with contextlib.closing(sqlite3.connect(copy)) as connection, connection:
        if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (_FILES_TABLE,)).fetchone():
            return {}
        connection.execute("PRAGMA secure_delete=ON")
        rows = connection.execute(f"SELECT name, content FROM {_FILES_TABLE}").fetchall()  # noqa: S608
        connection.execute(f"DROP TABLE {_FILES_TABLE}")
    return {name: content for name, content in rows if Path(name).name == name}


def _swap(copy: Path, place: Path, stamp: str) -> list[Path]:
    """Puts the copy in the place of the database, which is moved aside."""
    kept = []
    if place.exists():
        aside = place.with_name(f"{place.name}.before-{stamp}")
        with contextlib.suppress(sqlite3.Error), contextlib.closing(sqlite3.connect(place)) as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # what is in the log belongs to the kept file
        place.rename(aside)
        kept.append(aside)
    for ending in ("-wal", "-shm"):
        place.with_name(place.name + ending).unlink(missing_ok=True)
    give_to_owner_of(place.parent, copy)
    copy.rename(place)
    return kept


def _copy_into(settings: DatabaseSettings, copy: Path) -> None:
    with contextlib.closing(_own(copy)) as source, contextlib.closing(open_database(settings, alone=True)) as target:
        copy_all(source, target)


def _write_files(folder: Path, files: dict[str, bytes], stamp: str) -> tuple[list[str], list[Path]]:
    """Names of the files that were written, and where those lie that had another content."""
    written, aside = [], []
    for name, content in files.items():
        place = folder / name
        if place.exists():
            if place.read_bytes() == content:
                continue
            kept = place.with_name(f"{name}.before-{stamp}")
            place.rename(kept)
            aside.append(kept)
        with os.fdopen(os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            give_to_owner_of(folder, file.fileno())
            file.write(content)
        written.append(name)
    return written, aside


# --- both -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _File:
    """DatabaseSettings of an SQLite file."""

    data: Path
    database: str | None


def _own(file: Path) -> Database:
    """A database that exists for a copy only."""
    return open_database(_File(file.parent, f"sqlite:///{file}"), reserve_bytes=_SMALL_RESERVE_BYTES)


@contextlib.contextmanager
def _workshop(room: Path) -> Iterator[Path]:
    """A private folder on the same disk."""
    try:
        folder = Path(tempfile.mkdtemp(prefix=".perfagent-copy-", dir=room.resolve()))
    except OSError as error:
        raise ResourceError(f"{room} cannot be written ({error.strerror})") from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
