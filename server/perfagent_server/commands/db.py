"""`perfagent db upgrade|backup|restore|copy`. A backup is taken while the server runs; a restore and a copy need it
stopped."""

from __future__ import annotations

import argparse
import contextlib
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from perfagent.endpoint.local_server import ADMIN_TOKEN_FILE
from perfagent.errors import ResourceError
from perfagent.wire.quantities import some
from perfagent_server.settings import Settings

if TYPE_CHECKING:
    from perfagent_server.database import Database

__all__ = ["command"]


def command(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "The server's database: bring it to this version, back it up, restore it, copy it to PostgreSQL."
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="upgrade|backup|restore|copy")
    upgrade = actions.add_parser(
        "upgrade", help="bring the database to this version (starting the server does that too)"
    )
    upgrade.add_argument(
        "--check", action="store_true", help="only print what would be done; exit code 1 if there is something"
    )
    upgrade.set_defaults(run=_upgrade)
    backup = actions.add_parser(
        "backup", help="copy the database, SQLite or PostgreSQL, into a new file, also while the server writes"
    )
    backup.add_argument("file", type=Path)
    backup.add_argument(
        "--without-secrets",
        action="store_true",
        help="leave out key-pepper, admin-token and rules.toml of the data folder",
    )
    backup.set_defaults(run=_backup)
    restore = actions.add_parser("restore", help="put a backup into an empty database, SQLite or PostgreSQL")
    restore.add_argument("file", type=Path)
    restore.add_argument(
        "--replace", action="store_true", help="also where SQLite has data: the old file is kept beside the new one"
    )
    restore.set_defaults(run=_restore)
    copy = actions.add_parser("copy", help="copy everything into another, empty database")
    copy.add_argument("source", metavar="FROM", help="sqlite:////path/perfagent.db or postgresql://user@host/name")
    copy.add_argument("target", metavar="TO", help="the same; must be empty")
    copy.set_defaults(run=_copy_all)
    for action in (upgrade, backup, restore):
        action.add_argument("--data", type=Path, metavar="DIR", help="the data folder (default: PERFAGENT_DATA)")
        action.add_argument(
            "--database",
            metavar="URL",
            help="sqlite:////path/perfagent.db or postgresql://user@host/name (default: SQLite in the data folder)",
        )
        action.add_argument(
            "--metrics", metavar="URL", help="ClickHouse for samples: clickhouse://user:password@host:8123/perfagent"
        )


def _settings(arguments: argparse.Namespace) -> Settings:
    return Settings.from_env(data=arguments.data, database=arguments.database, metrics=arguments.metrics)


def _upgrade(arguments: argparse.Namespace) -> int:
    from perfagent_server import schema
    from perfagent_server.commands.server_lock import only_server
    from perfagent_server.database import open_database
    from perfagent_server.store.clickhouse.connection import Address, ClickHouse
    from perfagent_server.store.clickhouse.schema import VERSION, ensure_schema

    settings = _settings(arguments)
    if arguments.check:
        return _show_missing(settings)
    with only_server(settings):
        open_database(settings, alone=True).close()
    print(f"the database is at schema version {schema.head()}")
    if settings.metrics is not None:
        address = Address.parse(settings.metrics)
        ensure_schema(ClickHouse(address))
        print(f"ClickHouse at {address} is at schema version {VERSION}")
    return 0


def _show_missing(settings: Settings) -> int:
    """Exit code 1 where there is something to do."""
    from perfagent_server import schema
    from perfagent_server.database import is_sqlite, revision_of, sqlite_path

    found = revision_of(settings)
    where = str(sqlite_path(settings)) if is_sqlite(settings) else "in PostgreSQL"
    left = schema.missing(found, where)
    if not left:
        print(f"the database is at schema version {found}; there is nothing to do")
        return 0
    print(f"the database is at schema version {found or 'none: it is empty'}; an upgrade would run:")
    for revision, what in left:
        print(f"  {revision}  {what}")
    return 1


def _copy_all(arguments: argparse.Namespace) -> int:
    from perfagent_server.commands.server_lock import only_server
    from perfagent_server.database import is_sqlite, open_database, sqlite_path
    from perfagent_server.store.copying import copy_all

    with contextlib.ExitStack() as held:

        def opened(url: str) -> Database:
            settings = Settings.from_env(database=url)
            if is_sqlite(settings):
                held.enter_context(only_server(replace(settings, data=sqlite_path(settings).parent)))
            database = open_database(settings, alone=True)
            held.callback(database.close)
            return database

        source_settings = Settings.from_env(database=arguments.source)
        if is_sqlite(source_settings) and not sqlite_path(source_settings).exists():
            raise ResourceError(f"there is no database at {sqlite_path(source_settings)}")
        source, target = opened(arguments.source), opened(arguments.target)
        rows = copy_all(source, target, lambda table, rows: print(f"{table}: {some(rows, 'row')}", flush=True))
        print(f"{some(rows, 'row')} {'is' if rows == 1 else 'are'} in {target.backend.where} now")
        _say_where_samples_are(target)
        print(
            "Start the server with the same --data as before: keys and the administrator's token belong to that folder."
        )
    return 0


def _say_where_samples_are(database: Database) -> None:
    from perfagent_server.store.clickhouse.marks import batches_of

    with database.read() as connection:
        address = batches_of(connection).address
    if address:
        print(
            f"Its samples stay in ClickHouse at {address}: start the server with the same --metrics, and no longer with the old "
            "database, which would take these samples for its own."
        )


def _backup(arguments: argparse.Namespace) -> int:
    from perfagent_server.store.backup import back_up

    target: Path = arguments.file
    names = () if arguments.without_secrets else _files_of_the_folder()
    held = back_up(_settings(arguments), target, names)
    print(f"the database is saved as {target} ({target.stat().st_size:,} bytes)")
    if held:
        print(f"It holds these files of the data folder, too, so keep it secret: {', '.join(held)}")
    else:
        print(
            "It holds no file of the data folder: no key is valid after a restore without the folder's key-pepper, or the "
            "same PERFAGENT_KEY_PEPPER."
        )
    _warn_of_clickhouse(target)
    return 0


def _warn_of_clickhouse(backup: Path) -> None:
    """Such a backup is one of two."""
    with contextlib.closing(sqlite3.connect(f"{backup.resolve().as_uri()}?mode=ro", uri=True)) as connection:
        here = connection.execute("SELECT count(*) FROM cursor WHERE name = 'samples'").fetchone()[0]
    if here:
        print(
            "Most samples are in ClickHouse and not in this file: back that up after it, with ClickHouse's own "
            "BACKUP DATABASE perfagent TO Disk('backups', 'NAME.zip')"
        )


def _restore(arguments: argparse.Namespace) -> int:
    from perfagent_server.commands.server_lock import only_server
    from perfagent_server.store.backup import restore

    settings = _settings(arguments)
    with only_server(settings):
        done = restore(settings, arguments.file, replace=arguments.replace)
    print(f"{arguments.file} is the database now")
    if done.files:
        print(f"restored into {settings.data}: {', '.join(done.files)}")
    for path in done.kept:
        print(f"what was there before is kept as {path}")
    return 0


def _files_of_the_folder() -> tuple[str, ...]:
    """Without the first, no key is valid; the last holds thresholds that people chose."""
    from perfagent_server.engine.rule_settings import RULES_FILE
    from perfagent_server.security.keys import PEPPER_FILE

    return (PEPPER_FILE, ADMIN_TOKEN_FILE, RULES_FILE)
