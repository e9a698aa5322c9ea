from __future__ import annotations

import struct
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


NAMES = ("loss", "lr")


def _packed(rows: list[tuple[Any, ...]], *, ticks: int = 3) -> list[Packed]:
    packer, blocks = Packer(Columns()), []
    for tick in range(ticks):
        assert all(packer.add(*row[:3], NAMES, row[3]) for row in rows[tick::ticks])
        blocks += packer.take()
    return blocks


def _lost(row: Any) -> None:
    raise AssertionError(row)


@given(ROWS)
def test_packed_rows_become_columns_or_rows_again(rows: list[tuple[Any, ...]]) -> None:
    ordered = [row for tick in range(3) for row in rows[tick::3]]
    expected = [(*row[:3], dict(zip(NAMES, row[3], strict=True))) for row in ordered]
    blocks = _packed(rows)
    assert grouped(blocks) == Columns().groups(expected)
    for (*when, found), (*then, given_) in zip([row for b in blocks for row in rows_in(b)], expected, strict=True):
        assert when == then
        assert list(map(repr, found.values())) == [repr(float(value)) for value in given_.values()]


def test_series_beyond_the_limit_are_counted_and_left_out() -> None:
    columns = Columns(max_series=1)
    assert columns.knows(("a",))
    blocks = [Packed(("b",), struct.pack("<qddd", 1, 0.0, 0.0, 2.0))]
    assert read(Draft([], [], blocks), StepReader(), columns, _lost) == []
    assert columns.refused["series"] == 1
