"""Statements of the hot paths: compiled once per dialect, then handed straight to the driver.

SQLAlchemy's own execution costs 80 to 150 µs a statement and 10 µs a row here, sqlite3's 3 µs: with a frame per second
from a thousand agents that is the difference between a third of a core and a fifth of one. The SQL still comes from
SQLAlchemy, so both databases understand it; values go to the driver as they are, which numbers, text and bytes allow.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

from sqlalchemy import ARRAY, ColumnElement, Connection, Engine, Table, any_, bindparam, func, select
from sqlalchemy.dialects import postgresql, sqlite

__all__ = ["Prepared", "among", "compile_all", "insert_for", "pipelined", "put", "upsert"]

Values = Mapping[str, Any]


def insert_for(dialect: str) -> Any:
    """The INSERT of a dialect: the one that knows ON CONFLICT."""
    return postgresql.insert if dialect == "postgresql" else sqlite.insert


def upsert(dialect: str, table: Table, names: Iterable[str]) -> Any:
    """The INSERT of a row of these columns, in place of the row with the same primary key."""
    statement = insert_for(dialect)(table)
    key = [column.name for column in table.primary_key.columns]
    rest = {name: statement.excluded[name] for name in names if name not in key}
    return statement.on_conflict_do_update(index_elements=key, set_=rest)


def put(connection: Connection, table: Table, values: Values) -> None:
    """Writes a row, in place of the one with the same primary key."""
    connection.execute(upsert(connection.dialect.name, table, values).values(**values))


def among(connection: Connection, column: Any, values: Iterable[Any]) -> ColumnElement[bool]:
    """`column IN values` with one parameter, however many values there are. PostgreSQL takes 65,535 parameters in a
    statement, and SQLite of python.org 32,766: 4,096 ranks with 16 series each are more."""
    listed = list(values)
    if connection.dialect.name == "postgresql":
        return column == any_(bindparam(None, listed, ARRAY(column.type)))  # type: ignore[no-any-return]
    return column.in_(select(func.json_each(json.dumps(listed)).table_valued("value").c.value))  # type: ignore[no-any-return]


@contextlib.contextmanager
def pipelined(connection: Connection) -> Iterator[None]:
    """On PostgreSQL, statements in here are sent before the answers of earlier ones are read: a transaction of ten
    statements waits four times. An error of a statement is raised where the next answer is read, at the end at the latest.
    Only for statements of this module: SQLAlchemy's own execution looks for rows before they have come, and finds none."""
    if connection.dialect.driver != "psycopg":
        yield
        return
    with connection.connection.driver_connection.pipeline():  # type: ignore[union-attr]
        yield


def _is_pipelined(connection: Connection) -> bool:
    if connection.dialect.driver != "psycopg":
        return False
    status = connection.connection.driver_connection.pgconn.pipeline_status  # type: ignore[union-attr]
    return bool(status)  # 0 is off


_LINES_AT_ONCE = 64  # that PostgreSQL sends of a stream; a frame may have megabytes
_every: list[Prepared] = []


def compile_all(engine: Engine) -> None:
    """Compiles every statement that the program has by now: a store does so when it is opened, so that the first frame,
    and the first look of the compactor, take no longer than the others."""
    for statement in _every:
        statement._in(engine)


class Prepared:
    """columns: the names that every set of values has (those of an INSERT: all columns that are not left to the
    database). For statements that differ between dialects `statement` is a function of the dialect's name. at_once: how
    many rows of an INSERT go into one statement where that is quicker: SQLite takes as long to begin one as for two
    small rows."""

    def __init__(self, statement: Any, columns: Sequence[str] | None = None, *, at_once: int = 1) -> None:
        self._statement, self._columns = statement, columns
        self._together = (
            None if at_once == 1 else Prepared(lambda dialect: _many_values(self._of(dialect), columns, at_once))
        )
        self._at_once = at_once
        self._compiled: dict[str, tuple[str, Callable[[Values], Any]]] = {}
        # dialect -> whether the driver takes a row's values in the order of `columns`
        self._as_given: dict[str, bool] = {}
        _every.append(self)

    def _in(self, connection: Connection | Engine) -> tuple[str, Callable[[Values], Any]]:
        """The SQL, and what turns values into the driver's parameters."""
        name = connection.dialect.name
        found = self._compiled.get(name)
        if found is None:
            compiled = self._of(name).compile(dialect=connection.dialect, column_keys=self._columns)
            columns = self._columns or ()
            # SQLAlchemy adds parameters of its own to some statements, such as OFFSET 0; those of columns stand for
            # "required".
            own = {key: value for key, value in compiled.params.items() if value is not None and key not in columns}
            self._as_given[name] = (
                not own and compiled.positiontup is not None and list(compiled.positiontup) == list(columns)
            )
            found = self._compiled[name] = (str(compiled), _binder(compiled.positiontup, own))
        return found

    def _of(self, dialect: str) -> Any:
        return self._statement(dialect) if callable(self._statement) else self._statement

    def many(self, connection: Connection, rows: Iterable[Values]) -> int:
        """Runs the statement for each row; answers how many rows of the table it has touched."""
        sql, bind = self._in(connection)
        cursor = connection.connection.cursor()
        try:
            cursor.executemany(sql, [bind(row) for row in rows])
            return int(cursor.rowcount)
        finally:
            cursor.close()

    def rows(self, connection: Connection, rows: Sequence[Sequence[Any]]) -> None:
        """Runs an INSERT for each row, whose values are in the order of `columns`."""
        sql, bind = self._in(connection)
        columns = self._columns
        assert columns is not None
        cursor = connection.connection.cursor()
        try:
            if self._as_given.get(connection.dialect.name):
                if self._together is not None:
                    rows = self._together._filled(connection, cursor, rows, self._at_once)
                cursor.executemany(sql, rows)
            else:
                cursor.executemany(sql, [bind(dict(zip(columns, row, strict=True))) for row in rows])
        finally:
            cursor.close()

    def _filled(
        self, connection: Connection, cursor: Any, rows: Sequence[Sequence[Any]], size: int
    ) -> Sequence[Sequence[Any]]:
        """Runs the statement for as many rows as fill it, each time `size`; answers those that are left."""
        sql, _ = self._in(connection)
        whole = len(rows) // size * size
        cursor.executemany(
            sql, ([value for row in rows[at : at + size] for value in row] for at in range(0, whole, size))
        )
        return rows[whole:]

    def each(self, connection: Connection, rows: Iterable[Values]) -> list[Any]:
        """Runs the statement for each row; answers the first line of each result, None where there is none."""
        sql, bind = self._in(connection)
        bound = [bind(row) for row in rows]
        cursor = connection.connection.cursor()
        found = []
        try:
            if bound and connection.dialect.driver == "psycopg":  # all in one round trip
                cursor.executemany(sql, bound, returning=True)  # type: ignore[call-arg]
                return [result.fetchone() for result in cursor.results()]
            for values in bound:
                cursor.execute(sql, values)
                found.append(cursor.fetchone())
        finally:
            cursor.close()
        return found

    def ask(self, connection: Connection, rows: Sequence[Values]) -> Callable[[], list[Any]]:
        """each(), whose answer is given later, when it is needed: inside pipelined() what comes next is sent before."""
        if len(rows) == 1 and _is_pipelined(connection):  # of many rows, the driver's own executemany is quicker
            cursor = self._sent(connection, rows[0])
            return lambda: [cursor.fetchone()]
        found = self.each(connection, rows)
        return lambda: found

    def send(self, connection: Connection, rows: Sequence[Values]) -> None:
        """many(), without an answer: inside pipelined() nothing waits for it."""
        if len(rows) == 1 and _is_pipelined(connection):
            self._sent(connection, rows[0])
        else:
            self.many(connection, rows)

    def _sent(self, connection: Connection, row: Values) -> Any:
        sql, bind = self._in(connection)
        cursor = connection.connection.cursor()
        cursor.execute(sql, bind(row))
        return cursor

    def all(self, connection: Connection, values: Values) -> list[Any]:
        """Runs the statement once; answers all lines of its result."""
        sql, bind = self._in(connection)
        cursor = connection.connection.cursor()
        try:
            cursor.execute(sql, bind(values))
            return list(cursor.fetchall())
        finally:
            cursor.close()

    def stream(self, connection: Connection, values: Values) -> Generator[Any, None, None]:
        """Runs the statement once; gives the lines of its result one by one, as they are read."""
        sql, bind = self._in(connection)
        if connection.dialect.driver == "psycopg":
            cursor = connection.connection.cursor(name="stream")  # else the driver reads all lines at once
            cursor.itersize = _LINES_AT_ONCE  # type: ignore[attr-defined]
        else:
            cursor = connection.connection.cursor()
        try:
            cursor.execute(sql, bind(values))
            yield from cursor  # type: ignore[misc]
        finally:
            try:
                cursor.close()
            except Exception:  # the connection was cut: psycopg knows that now, and closes without asking the server
                cursor.close()
                raise


def _many_values(statement: Any, columns: Sequence[str] | None, rows: int) -> Any:
    """An INSERT of so many rows, whose parameters are in the order of the rows and, in each, of the columns."""
    assert columns is not None
    return statement.values([{name: bindparam(f"{name}_{at}") for name in columns} for at in range(rows)])


def _binder(order: Sequence[str] | None, own: Values) -> Callable[[Values], Any]:
    if order is None:
        return lambda values: {**own, **values}
    if any(name in own for name in order):
        return lambda values: [values[name] if name in values else own[name] for name in order]
    return lambda values: [values[name] for name in order]
