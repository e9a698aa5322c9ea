from __future__ import annotations

import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from perfagent.decode.step_decoder import StepReader
from perfagent.delivery.columns import Columns
from perfagent.delivery.drafts import Draft, read
from perfagent.delivery.row_packing import Packed, Packer, grouped, rows_in

NUMBERS = st.floats() | st.integers(-(2**60), 2**60) | st.booleans() | st.floats(width=32)
ROWS = st.lists(
    st.tuples(st.integers(-(2**63), 2**63 - 1), st.floats(0, 2e9), st.floats(0, 1e9), st.tuples(NUMBERS, NUMBERS)),
    min_size=1,
    max_size=20,
)


def _packed(rows: list[tuple[Any, ...]], names: tuple[str, ...], *, ticks: int = 3) -> list[Packed]:
    packer, blocks = Packer(Columns()), []
    for tick in range(ticks):
        assert all(
            packer.add(step, time, monotonic, names, values) for step, time, monotonic, values in rows[tick::ticks]
        )
        blocks += packer.take()
    return blocks


def _lost(row: Any) -> None:
    raise AssertionError(row)


@given(ROWS)
def test_packed_rows_become_the_columns_of_the_rows(rows: list[tuple[Any, ...]]) -> None:
    names = ("loss", "lr")
    ordered = [row for tick in range(3) for row in rows[tick::3]]
    (expected,) = Columns().groups(
        [(step, time, monotonic, names, values) for step, time, monotonic, values in ordered]
    )
    assert grouped(_packed(rows, names)) == [expected]


@given(ROWS)
def test_packed_rows_can_be_unpacked(rows: list[tuple[Any, ...]]) -> None:
    (block,) = _packed(rows, ("a", "b"), ticks=1)
    for row, (step, time, monotonic, values) in zip(rows_in(block), rows, strict=True):
        assert row[:4] == (step, time, monotonic, ("a", "b"))
        assert all(a == b or (math.isnan(a) and math.isnan(b)) for a, b in zip(row[4], map(float, values), strict=True))


def test_series_beyond_the_limit_are_counted_and_left_out() -> None:
    columns = Columns(max_series=1)
    assert columns.knows(("a",))
    blocks = [Packed(("b",), _packed([(1, 0.0, 0.0, (2.0,))], ("b",), ticks=1)[0].data)]
    assert read([Draft([], [], blocks)], StepReader(), columns, _lost) == []
    assert columns.refused["series"] == 1
