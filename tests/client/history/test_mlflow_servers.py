"""MLflow's tables in a real PostgreSQL and a real MariaDB read as those in a file do.

MariaDB: the server that PERFAGENT_TEST_MARIADB names (mysql://user:password@host/database), or mariadbd, started here.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import postgresql_server
import pytest
from builders import until
from old_mlflow import VERSIONS, database, runs_in
from sqlalchemy import Column, Double, Float, MetaData, Table, create_engine, text

from perfagent_client.history.mlflow_store import from_uri

MARIADB = "PERFAGENT_TEST_MARIADB"
needs_mariadb = pytest.mark.skipif(
    importlib.util.find_spec("pymysql") is None or not (os.environ.get(MARIADB) or shutil.which("mariadbd")),
    reason=f"needs pymysql, and mariadbd or {MARIADB}",
)


def copy_tables(source: Path, uri: str) -> None:
    """MLflow's columns are double precision on each server, which SQLite calls FLOAT."""
    file, server = create_engine(f"sqlite:///{source}"), create_engine(uri)
    with file.connect() as here, server.begin() as there:
        for name in ("experiments", "runs", "metrics", "params", "tags"):
            found = Table(name, MetaData(), autoload_with=here, resolve_fks=False)
            columns = [Column(one.name, Double() if isinstance(one.type, Float) else one.type) for one in found.columns]
            made = Table(name, MetaData(), *columns)
            made.drop(there, checkfirst=True)
            made.create(there)
            there.execute(made.insert(), [dict(row._mapping) for row in here.execute(found.select())])
    file.dispose()
    server.dispose()


def told(runs: Any) -> dict[str, Any]:
    return {
        run.source: (
            run.name, run.project, run.group, run.tags, run.config, run.state, run.started, run.ended, run.left_out[:0],
            {
                name: sorted((time, step, value.hex()) for step, time, value in zip(one.step, one.time, one.value, strict=True))
                for name, one in run.series.items()
            },
        )
        for run in runs
    }  # fmt: skip


@pytest.mark.postgresql
@pytest.mark.sql
@pytest.mark.parametrize("version", VERSIONS)
def test_mlflow_in_postgresql_reads_as_in_a_file(version: str, tmp_path: Path) -> None:
    path = database(version, tmp_path)
    url = postgresql_server.empty_database("perfagent_mlflow").replace("postgresql://", "postgresql+psycopg://")
    copy_tables(path, url)
    assert told(from_uri(url.replace("+psycopg", "+psycopg2"))) == told(runs_in(path).values())


@pytest.fixture(scope="module")
def mariadb(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if named := os.environ.get(MARIADB):
        yield named
        return
    folder = tmp_path_factory.mktemp("mariadb")
    socket = f"/tmp/perfagent-mariadb-{os.getpid()}.sock"  # a path of at most 107 bytes
    common = ["--no-defaults", f"--datadir={folder}", "--user=root"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.run(["mariadb-install-db", *common, "--auth-root-authentication-method=normal"], check=True, **quiet)
    server = subprocess.Popen(["mariadbd", *common, f"--socket={socket}", "--skip-networking"], **quiet)
    try:
        until(lambda: answers(socket), why="MariaDB does not answer")
        yield f"mysql://root@localhost/mlflow?unix_socket={socket}"
    finally:
        server.terminate()
        server.wait()


def answers(socket: str) -> bool:
    if not Path(socket).exists():
        return False
    engine = create_engine(f"mysql+pymysql://root@localhost/?unix_socket={socket}")
    with engine.begin() as connection:
        connection.execute(text("CREATE DATABASE IF NOT EXISTS mlflow CHARACTER SET utf8mb4"))
    engine.dispose()
    return True


@pytest.mark.real
@needs_mariadb
@pytest.mark.parametrize("version", VERSIONS)
def test_mlflow_in_mariadb_reads_as_in_a_file(version: str, mariadb: str, tmp_path: Path) -> None:
    path = database(version, tmp_path)
    copy_tables(path, mariadb.replace("mysql://", "mysql+pymysql://"))
    assert told(from_uri(mariadb)) == told(runs_in(path).values())
