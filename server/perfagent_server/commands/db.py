"""`perfagent db upgrade|backup|restore`. A backup is taken while the server runs; a restore needs it stopped."""

from __future__ import annotations

import argparse
import contextlib
import os
import sqlite3
import time
from pathlib import Path

from perfagent.errors import ResourceError
from perfagent_server.settings import Settings

__all__ = ["command"]


def command(parser: argparse.ArgumentParser) -> None:
    parser.description = "The server's database: bring it to this version, back it up, restore it."
    actions = parser.add_subparsers(dest="action", required=True, metavar="upgrade|backup|restore")
    upgrade = actions.add_parser(
        "upgrade", help="bring the database to this version (starting the server does that too)"
    )
    upgrade.set_defaults(run=_upgrade)
    backup = actions.add_parser("backup", help="copy the database into a new file, also while the server writes")
    backup.add_argument("file", type=Path)
    backup.set_defaults(run=_backup)
    restore = actions.add_parser(
        "restore", help="put a backup in the place of the database; the old one is kept beside it"
    )
    restore.add_argument("file", type=Path)
    restore.set_defaults(run=_restore)
    for action in (upgrade, backup, restore):
        action.add_argument("--data", type=Path, metavar="DIR", help="the data folder (default: PERFAGENT_DATA)")
        action.add_argument(
            "--database",
            metavar="URL",
            help="an SQLite file as sqlite:////path/perfagent.db (default: in the data folder)",
        )


def _settings(arguments: argparse.Namespace) -> Settings:
    return Settings.from_env(data=arguments.data, database=arguments.database)


def _sqlite_file(settings: Settings) -> Path:
    from perfagent_server.database import sqlite_path

    return sqlite_path(settings)


def _upgrade(arguments: argparse.Namespace) -> int:
    from perfagent_server import schema
    from perfagent_server.commands.server_lock import only_server
    from perfagent_server.database import open_database

    settings = _settings(arguments)
    with only_server(settings):
        open_database(settings).close()
    print(f"the database is at schema version {schema.head()}")
    return 0


def _backup(arguments: argparse.Namespace) -> int:
    source = _sqlite_file(_settings(arguments))
    if not source.exists():
        raise ResourceError(f"there is no database at {source}; name its folder with --data")
    target: Path = arguments.file
    try:
        os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    except FileExistsError:
        raise ResourceError(f"{target} exists; give the name of a new file") from None
    except OSError as error:
        raise ResourceError(f"{target} cannot be written ({error.strerror})") from error
    try:
        _copy(source, target)
    except BaseException:
        target.unlink(missing_ok=True)
        raise
    print(f"{source} is saved as {target} ({target.stat().st_size:,} bytes)")
    return 0


def _restore(arguments: argparse.Namespace) -> int:
    from perfagent_server.commands.server_lock import only_server
    from perfagent_server.database import open_database

    settings = _settings(arguments)
    source: Path = arguments.file
    target = _sqlite_file(settings)
    if not source.is_file():
        raise ResourceError(f"there is no file {source}")
    _check(source)
    with only_server(settings):
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        fresh = target.with_name(f"{target.name}.restoring")
        fresh.unlink(missing_ok=True)
        os.close(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        _copy(source, fresh)
        kept = None
        if target.exists():
            kept = target.with_name(f"{target.name}.before-{time.strftime('%Y%m%d-%H%M%S')}")
            with contextlib.closing(sqlite3.connect(target)) as connection:
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # what is in the log belongs to the kept file
            target.rename(kept)
        for ending in ("-wal", "-shm"):
            target.with_name(target.name + ending).unlink(missing_ok=True)
        fresh.rename(target)
        open_database(settings).close()  # upgrades an older backup, and refuses a newer one with a sentence
    print(f"{source} is the database now" + (f"; the one before is kept as {kept}" if kept else ""))
    return 0


def _copy(source: Path, target: Path) -> None:
    """SQLite's online backup: a consistent copy while others write."""
    try:
        with contextlib.closing(sqlite3.connect(f"{source.resolve().as_uri()}?mode=ro", uri=True, timeout=30)) as old, \
             contextlib.closing(sqlite3.connect(target)) as new:  # fmt: skip
            old.backup(new)
            new.execute("PRAGMA journal_mode=DELETE")  # one file, not three
    except sqlite3.Error as error:
        raise ResourceError(f"{source} could not be copied to {target} ({error})") from error


def _check(file: Path) -> None:
    try:
        with contextlib.closing(sqlite3.connect(f"{file.resolve().as_uri()}?mode=ro", uri=True)) as connection:
            verdict = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
            ours = connection.execute("SELECT count(*) FROM sqlite_master WHERE name = 'alembic_version'").fetchone()[0]
    except sqlite3.Error as error:
        raise ResourceError(f"{file} is no database ({error}); give a file that `perfagent db backup` made") from error
    if verdict != "ok" or not ours:
        raise ResourceError(f"{file} is damaged or not ours ({verdict}); give a file that `perfagent db backup` made")
