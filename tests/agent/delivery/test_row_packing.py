from __future__ import annotations

import gc
import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from perfagent.decode.step_decoder import StepReader
from perfagent.delivery.columns import Columns
from perfagent.delivery.drafts import Draft, pieces, read
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


ODD: tuple[tuple[int, tuple[Any, ...], tuple[Any, ...]], ...] = (
    (1, ("a",), ("text",)), (1, ("a",), (None,)), (1, ("a",), (10**400,)), (2**63, ("a",), (1.0,)), (1, ("",), (1.0,)),
    (1, ("new\nline",), (1.0,)), (1, (3,), (1.0,)), (1, (), ()), (1, ("a", "b"), (1.0,)),
)  # fmt: skip


def test_what_is_not_plain_is_left_to_those_who_look_closer() -> None:
    packer = Packer(Columns())
    for step, names, values in ODD:
        assert not packer.add(step, 0.0, 0.0, names, values), names
    assert packer.take() == []


def test_series_beyond_the_limit_are_counted_and_left_out() -> None:
    columns = Columns(max_series=1)
    assert columns.knows(("a",))
    blocks = [Packed(("b",), _packed([(1, 0.0, 0.0, (2.0,))], ("b",), ticks=1)[0].data)]
    assert read([Draft([], [], blocks)], StepReader(), columns, _lost) == []
    assert columns.refused["series"] == 1


def test_packed_rows_are_no_objects_for_the_garbage_collector() -> None:
    blocks = _packed([(step, 0.0, 0.0, (0.5, 1.5)) for step in range(3000)], ("a", "b"), ticks=1)
    gc.collect()
    before = gc.get_count()[0]
    groups = read([*pieces([Draft([], [], blocks)])], StepReader(), Columns(), _lost)
    assert gc.get_count()[0] - before < 100
    assert groups[0].rows == 3000
