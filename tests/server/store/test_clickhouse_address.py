"""What can be said about ClickHouse without one: its address, the statements that make its tables, and a server without it."""

from __future__ import annotations

import pytest
from api_builders import api
from frames import BEGIN, frame, rows

from perfagent.errors import ConfigError
from perfagent_server.store.clickhouse.connection import Address, Away
from perfagent_server.store.clickhouse.rows import TailRow, pack
from perfagent_server.store.codec.tail import pack_tail
from perfagent_server.store.opening import open_store

NOBODY = "clickhouse://127.0.0.1:1/perfagent"


def test_an_address_has_defaults_and_hides_its_password() -> None:
    address = Address.parse("clickhouse://me:p%40ss@db.example/fleet?secure=1&cluster=main")
    assert address == Address("db.example", 8443, "me", "p@ss", "fleet", secure=True, cluster="main")
    assert "p@ss" not in f"{address} {address!r}"
    assert Address.parse("clickhouse://h") == Address("h", 8123)
    wrong = ("http://h:8123/x", "clickhouse://", "clickhouse://h:port/x", "clickhouse://h/a-b", "clickhouse://h/x;DROP")
    for url in (*wrong, "clickhouse://h/x?cluster=a'b", "clickhouse://h/x?other=1"):
        with pytest.raises(ConfigError, match=r"metrics"):
            Address.parse(url)


def test_records_are_sorted_and_their_extents_known() -> None:
    sent = frame(1, rows({"b": [1.0, 2.0], "a": [3.0, float("nan")]}, [5, 4]))
    packed = pack([TailRow(1, "r1", 1, 0, BEGIN, sent.samples, pack_tail(sent.groups, []))])
    assert packed.samples == 4
    assert packed.data.index(b"\x01a") < packed.data.index(b"\x01b")
    assert packed.extents[("r1", 0, "a"), 1] == (4, 5, 2)
    assert packed.last["r1", 0, "b"][:2] == (1, 5)


@pytest.mark.real
def test_samples_are_taken_while_clickhouse_is_away(database) -> None:
    store, compactor, _ = open_store(database, NOBODY, rules_enabled=False)
    sent = frame(1, rows({"loss": [1.0, 2.0]}, [0, 1]))
    [receipt] = database.write(lambda connection: store.append_in(connection, [sent], BEGIN))
    assert receipt.stored == 2
    with pytest.raises(Away):
        compactor.run_once(everything=True)
    assert "2 samples wait" in compactor.trouble
    assert store.series("r1", "loss").mean == [1.0, 2.0]  # of the tail


@pytest.mark.real
def test_a_server_without_its_clickhouse_says_so(tmp_path) -> None:
    with api(tmp_path, metrics=NOBODY) as client:
        answer = client.get("/readyz")
        assert (answer.status_code, answer.json()["status"]) == (200, "degraded")
        assert "127.0.0.1:1/perfagent does not answer" in answer.json()["message"]
        assert "does not answer" in client.get("/api/v1/self").json()["samples"]
