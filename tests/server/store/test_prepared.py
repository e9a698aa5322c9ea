from sqlalchemy import insert, select

from perfagent_server.store.statements import Prepared
from perfagent_server.store.tables import ledger
from perfagent_server.store.write import append, compaction


def test_rows_that_come_by_the_thousand_go_to_the_driver_as_they_are(database) -> None:
    """Blocks come by the thousand: a dictionary and a list for each took as long as SQLite's own work."""
    statements = (
        append._new_series,
        compaction._put_axis,
        compaction._put_block,
        compaction._put_rollup,
        compaction._put_last,
    )
    for statement in statements:
        statement._in(database.engine)
        assert statement._as_given["sqlite"]


def test_rows_in_another_order_than_the_statement_has_still_reach_their_columns(database) -> None:
    turned = Prepared(insert(ledger), ("seq", "source"))
    database.write(lambda connection: turned.rows(connection, [(7, "a"), (8, "b")]))
    with database.read() as connection:
        found = connection.execute(select(ledger.c.source, ledger.c.seq).order_by(ledger.c.seq)).all()
    assert [tuple(row) for row in found] == [("a", 7), ("b", 8)]


def test_rows_that_go_several_at_once_all_arrive_with_those_that_are_left_over(database) -> None:
    together = Prepared(insert(ledger), ("source", "seq"), at_once=5)
    for source, count in (("few", 4), ("full", 5), ("more", 23)):
        database.write(lambda connection, s=source, n=count: together.rows(connection, [(s, seq) for seq in range(n)]))
    with database.read() as connection:
        found = connection.execute(select(ledger.c.source, ledger.c.seq)).all()
    wanted = [(source, seq) for source, count in (("few", 4), ("full", 5), ("more", 23)) for seq in range(count)]
    assert sorted(tuple(row) for row in found) == sorted(wanted)
