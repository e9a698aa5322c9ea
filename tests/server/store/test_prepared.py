"""Statements that go straight to the driver."""

from __future__ import annotations

import pytest
from sqlalchemy import insert, select

from perfagent_server.store.statements import Prepared
from perfagent_server.store.tables import ledger


@pytest.mark.sql
@pytest.mark.parametrize("columns", [("source", "seq"), ("seq", "source")])
@pytest.mark.parametrize("at_once", [1, 5])
def test_rows_of_any_number_and_order_reach_their_columns(database, columns: tuple[str, ...], at_once: int) -> None:
    statement = Prepared(insert(ledger), columns, at_once=at_once)
    sent = [[(f"of {count}", seq) for seq in range(count)] for count in (4, 5, 23)]
    for rows in sent:
        given = rows if columns[0] == "source" else [row[::-1] for row in rows]
        database.write(lambda connection, given=given: statement.rows(connection, given))
    with database.read() as connection:
        found = connection.execute(select(ledger.c.source, ledger.c.seq)).all()
    assert sorted(map(tuple, found)) == sorted(row for rows in sent for row in rows)
