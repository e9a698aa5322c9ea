"""Rows of silences, channels and deliveries that nobody of ours writes keep no alert from the other channels."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import postgresql_server
import pytest
from api_builders import api
from clocks import Clock
from engine_bench import NOW, Bench
from posting import Posts
from sqlalchemy import delete, text

from perfagent_server.alerts.outbox import Outbox
from perfagent_server.database import Database
from perfagent_server.store.tables import silence

ODD: list[Any] = ["soon", "", -1.0, 1e308, math.inf, -math.inf, b"\xff", 2**62]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    if postgresql_server.is_wanted():
        pytest.skip("only SQLite stores a text where a number is due")
    made = Bench(tmp_path)
    yield made
    made.database.close()


def put(database: Database, table: Any, **values: Any) -> None:
    """A row as it is: the types of its columns are not asked. What the table refuses is not stored."""
    columns = ", ".join(f'"{name}"' for name in values)
    row = text(f"INSERT INTO {table.name} ({columns}) VALUES ({', '.join(f':{name}' for name in values)})")
    with contextlib.suppress(Exception):
        database.write(lambda connection: connection.execute(row, values) and None)


def got(bench: Bench) -> list[str]:
    """Where an outbox that looks three times sends something."""
    posts = Posts()
    outbox = Outbox(bench.database, clock=Clock(NOW + 20), send=posts)
    for _ in range(3):
        outbox.send_due()
    return posts.urls


def tell(bench: Bench) -> None:
    engine = bench.engine(clock=Clock(NOW))
    bench.send({"loss": [2.0, math.nan]}, [1, 2])
    engine.run_once()


@pytest.mark.fault
@pytest.mark.parametrize("repeats", ["", "daily", "often"])
def test_s2_a_silence_whose_time_is_no_time_silences_nothing(bench: Bench, repeats: str) -> None:
    rest = {"project": "", "tag": "", "run": "", "rule": "", "note": "", "who": "", "created": 0.0, "repeats": repeats}
    for number, odd in enumerate(ODD):
        put(bench.database, silence, id=f"a{number}", starts=odd, ends=NOW + 9e9, **rest)
        put(bench.database, silence, id=f"b{number}", starts=0.0, ends=odd, **rest)
    assert len(bench.rows(silence)) > 8
    readable = [row["id"] for row in bench.rows(silence) if _is_time(row["starts"]) and _is_time(row["ends"])]
    bench.write(delete(silence).where(silence.c.id.in_(readable)))
    tell(bench)
    assert got(bench) == ["https://example.org/hook"]


def _is_time(value: Any) -> bool:
    return isinstance(value, (int, float)) and abs(value) < 1e12


def test_a_silence_that_cannot_be_read_is_named_with_the_rules(tmp_path: Path) -> None:
    if postgresql_server.is_wanted():
        pytest.skip("only SQLite stores a text where a number is due")
    with api(tmp_path) as client:
        rest = {"project": "", "tag": "", "run": "x", "rule": "", "note": "", "who": "", "created": "?", "repeats": ""}
        put(client.app.state.services.database, silence, id="si_1", starts="soon", ends=NOW, **rest)
        [named] = client.get("/api/v1/rules").json()["ignored"]
        assert "si_1" in named["setting"]
        assert client.get("/api/v1/silences").json() == {"silences": []}
        assert client.delete("/api/v1/silences/si_1").status_code == 204
