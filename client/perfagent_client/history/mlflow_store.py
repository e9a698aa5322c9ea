"""Runs of an MLflow database: a SQLite file, PostgreSQL or MySQL (tables: mlflow/store/tracking/dbmodels/models.py)."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from perfagent.errors import ConfigError, ResourceError, how_to_install
from perfagent.wire.quantities import some
from perfagent_client.history.mlflow_run import old_run, seconds
from perfagent_client.history.old_run import OldRun, Source
from perfagent_client.history.sqlite_file import rows, runs_of, tables, with_logs

__all__ = ["from_uri", "sources"]

_Ask = Callable[..., Iterable[Sequence[Any]]]
"""A statement, the list for sentences about damage, and the statement's values: its rows."""
_DRIVERS = {"postgresql": "postgresql+psycopg", "postgres": "postgresql+psycopg", "mysql": "mysql+pymysql"}
_RUNS = "SELECT run_uuid, experiment_id, name, status, start_time, end_time, lifecycle_stage FROM runs"
_METRICS = "SELECT m.key, m.step, m.value, m.is_nan, m.timestamp FROM metrics m WHERE m.run_uuid = :run ORDER BY "
_LARGEST = sys.float_info.max
"""What MLflow writes for an infinity."""


def sources(folder: Path, files: Sequence[Path]) -> Iterator[Source]:  # noqa: ARG001 - as all readers
    """Files with MLflow's tables."""
    for file in files:
        if "run_uuid" in tables(file).get("metrics", ""):
            yield Source("mlflow", with_logs(file, files), partial(_from_file, file))


def from_uri(uri: str) -> Iterator[OldRun]:
    """uri: as in `mlflow ui --backend-store-uri`. Raises ConfigError for one of another kind, ResourceError where a package
    is missing or the database does not answer."""
    scheme, _, rest = uri.partition("://")
    if scheme == "sqlite":
        path = Path(rest.removeprefix("/"))
        if not path.is_file():
            raise ConfigError(f"there is no file {path}")
        return _from_file(path)
    driver = _DRIVERS.get(scheme.partition("+")[0])
    if driver is None:
        raise ConfigError(
            f"{scheme}:// is no database of MLflow that can be read; give postgresql://, mysql:// or sqlite:///"
        )
    return _from_server(f"{driver}://{rest}")


def _from_file(path: Path) -> Iterator[OldRun]:
    return runs_of(path, "mlflow", lambda database, left_out: _runs(partial(rows, database), "m.rowid", left_out))


def _from_server(url: str) -> Iterator[OldRun]:
    try:
        from sqlalchemy import create_engine, text
        from sqlalchemy.exc import SQLAlchemyError
        from sqlalchemy.pool import NullPool

        engine = create_engine(url, poolclass=NullPool)
        with closing(engine.connect().execution_options(stream_results=True)) as database:

            def ask(statement: str, _: list[str], **values: object) -> Iterable[Sequence[Any]]:
                return database.execute(text(statement), values)

            yield from _runs(ask, "m.timestamp, m.step, m.value", [])
    except ModuleNotFoundError as error:
        raise ResourceError(f"{url.partition(':')[0]} needs {error.name}; {how_to_install('history')}") from error
    except SQLAlchemyError as error:
        reason, _, _ = str(getattr(error, "orig", error)).strip().partition("\n")
        raise ResourceError(f"the database {url.rpartition('@')[2]} cannot be read: {reason}") from error


def _runs(ask: _Ask, order: str, left_out: list[str]) -> Iterator[OldRun]:
    """left_out: of the whole database; its first run says it."""
    stages = "SELECT experiment_id, name, lifecycle_stage FROM experiments"
    experiments = {key: (name, stage) for key, name, stage in ask(stages, left_out)}
    found = list(ask(_RUNS, left_out))
    alive = [row for row in found if "deleted" not in (row[6], experiments.get(row[1], ("", ""))[1])]
    if len(alive) < len(found):
        left_out.append(f"{some(len(found) - len(alive), 'run')} of the same database, deleted in MLflow")
    names = {str(row[0]): str(row[2]) for row in found if row[2]}
    for run, experiment, _, status, start, end, _ in sorted(alive, key=lambda row: (seconds(row[4]) or 0, str(row[0]))):
        said = [*left_out]
        left_out = []
        params = ask("SELECT p.key, p.value FROM params p WHERE p.run_uuid = :run", said, run=run)
        config = {str(key): str(value) for key, value in params}
        labels = ask("SELECT t.key, t.value FROM tags t WHERE t.run_uuid = :run", said, run=run)
        tags = {str(key): str(value or "") for key, value in labels}
        one = old_run(str(run), str(experiments.get(experiment, [""])[0]), str(status), config, tags, names)
        one.started, one.ended, one.left_out = seconds(start), seconds(end), said
        _read_metrics(one, ask, order, run)
        yield one


def _read_metrics(run: OldRun, ask: _Ask, order: str, key: object) -> None:
    odd = 0
    for name, step, value, is_nan, time in ask(_METRICS + order, run.left_out, run=key):
        if isinstance(name, str) and isinstance(step, int) and step >= 0 and isinstance(value, float | int):
            clipped = abs(value) >= _LARGEST
            true = math.nan if is_nan else math.copysign(math.inf, value) if clipped else value
            run.add(name, step, true, math.nan if (when := seconds(time)) is None else when)
        else:
            odd += 1
    if odd:
        run.left_out.append(f"{some(odd, 'value')} at steps below 0, or damaged")
