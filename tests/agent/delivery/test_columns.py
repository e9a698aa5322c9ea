"""What users log becomes columns, or is refused and counted."""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from perfagent.delivery.columns import Columns, clean_name, is_urgent, number
from perfagent.delivery.row_packing import Packer, grouped, rows_in
from perfagent.wire import Event, Frame, Group, decode, encode


def group(**columns: list[float]) -> Group:
    rows = [float(row) for row in range(len(next(iter(columns.values()))))]
    return Group(step=[*map(int, rows)], time=rows, monotonic=rows, values=columns)  # type: ignore[arg-type]


def packed(columns: Columns, *logged: dict[Any, Any], step: Any = 1) -> list[Group]:
    packer = Packer(columns)
    for values in logged:
        packer.add(step, 0.0, 0.0, (*values,), values.values())
    return grouped(packer.take())


NUMBERS = st.floats() | st.integers(-(2**60), 2**60) | st.booleans() | st.floats(width=32)
ROWS = st.lists(
    st.tuples(st.integers(-(2**63), 2**63 - 1), st.floats(0, 2e9), st.floats(0, 1e9), st.tuples(NUMBERS, NUMBERS)),
    min_size=1,
)


@given(ROWS)
def test_rows_of_one_shape_become_one_group_or_rows_again(rows: list[tuple[Any, ...]]) -> None:
    """Over several ticks, in their order, each float to the last bit."""
    packer, blocks = Packer(Columns()), []
    for tick in range(3):
        for *when, values in rows[tick::3]:
            packer.add(*when, ("loss", "lr"), values)
        blocks += packer.take()
    expected = [(*when, *map(float, values)) for tick in range(3) for *when, values in rows[tick::3]]
    again = [(*when, *values.values()) for block in blocks for *when, values in rows_in(block)]
    (found,) = grouped(blocks)
    columns = zip(
        found.steps(), found.times(), found.monotonics(), found.column("loss"), found.column("lr"), strict=True
    )
    assert repr(again) == repr([*columns]) == repr(expected)


def test_column_is_float32_only_when_that_loses_nothing() -> None:
    sizes = {12: [0.5, math.nan, -0.0], 16: [0.1, 1.0], 8: [1e300]}
    assert [len(packed(Columns(), *({"x": one} for one in sizes[size]))[0].values["x"]) for size in sizes] == [*sizes]


# ---- A19: values

numbers = st.one_of(
    st.floats(), st.booleans(), st.integers(-(2**80), 2**80), st.integers(10**300, 10**400), st.integers(-(10**400), -(10**308)),
    st.floats(width=16).map(np.float16), st.floats(width=32).map(np.float32), st.floats().map(np.float64),
    st.floats().map(np.array), st.booleans().map(np.bool_), st.integers(-(2**63), 2**63 - 1).map(np.int64),
    st.floats(width=16).map(lambda v: torch.tensor(v, dtype=torch.bfloat16)),
    st.floats(width=16).map(lambda v: torch.tensor(v, dtype=torch.float16)),
    st.floats(width=32).map(lambda v: torch.nn.Parameter(torch.tensor(v))),
    st.floats().map(lambda v: torch.tensor(v, dtype=torch.float64)),
    st.integers(-(2**63), 2**63 - 1).map(torch.tensor), st.booleans().map(torch.tensor),
)  # fmt: skip


def expected(value: Any) -> float:
    try:
        return float(value.detach().item() if isinstance(value, torch.Tensor) else value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


@pytest.mark.fault
@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(numbers)
def test_a19_what_is_one_number_is_stored_bit_by_bit(value: Any) -> None:
    columns = Columns()
    (found,) = packed(columns, {"x": value})
    given, stored = expected(value), found.column("x")[0]
    assert struct.pack("<d", stored) == struct.pack("<d", given) or (math.isnan(stored) and math.isnan(given))
    assert number(value) == given or math.isnan(given)
    assert not columns.refused


class Hostile:
    ndim, dtype = 0, None

    def item(self) -> float:
        raise RuntimeError("no")


class OnDevice:
    ndim, dtype, device = 0, torch.float32, torch.device("cuda", 0)

    def item(self) -> float:
        raise AssertionError("it waits for the device")


REFUSED = (
    "1.0", b"1", None, 1j, [1.0], {}, object(), np.array([1.0]), np.str_("x"), torch.ones(1), torch.ones(2), torch.tensor(1j),
    torch.empty((), device="meta"), Hostile(), OnDevice(),
)  # fmt: skip


@pytest.mark.fault
def test_a19_what_is_no_number_is_refused_and_counted() -> None:
    """It costs only itself."""
    columns = Columns()
    for count, value in enumerate(REFUSED, start=1):
        assert columns.checked((1, 0.0, 0.0, {"ok": 1.0, "bad": value})) == (1, 0.0, 0.0, {"ok": 1.0}), value
        assert columns.refused == {"kind": count}
    found = packed(columns, {"loss": 0.5, "lr": None}, {"loss": 0.25, "lr": 0.5})
    assert sorted([*group.values] for group in found) == [["loss"], ["loss", "lr"]]


def test_step_beyond_64_bits_is_refused() -> None:
    columns = Columns()
    for step in (2**63, -(2**63) - 1, 1.5, "1"):
        assert packed(columns, {"x": 1.0}, step=step) == []
    assert columns.refused["step"] == 4
    assert [packed(columns, {"x": 1.0}, step=step)[0].steps()[0] for step in (2**63 - 1, -(2**63))] == [
        2**63 - 1,
        -(2**63),
    ]


# ---- A20: names

NAMES = (
    "x" * 10_000, "a\0b", "\ud800", "\u202eabc", "📉/loss", "../../etc/passwd", "<script>alert(1)</script>", "Ω" * 500, "\n",
)  # fmt: skip


@pytest.mark.fault
@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_a20_any_name_travels_within_256_bytes(name: str) -> None:
    clean = clean_name(name)
    assert clean and len(clean.encode()) <= 256 and "\0" not in clean
    frame = Frame(
        project="p", run="r", source="s", attempt=1, rank=0, seq=1, groups=packed(Columns(), {name: 1.0}),
        events=[Event(kind="log", time=0.0)],
    )  # fmt: skip
    assert list(decode(encode(frame)).groups[0].values) == [clean]


@pytest.mark.fault
def test_a20_series_beyond_the_limit_are_left_out_and_counted() -> None:
    """Those of the user leave room for what rules read."""
    user = [f"task/{n}" for n in range(7)]
    rules = ["loss", "agent/dropped", "phase/mine_s", "grad_norm/0.w", "node_gpu1/power_w", "train/loss", "val/loss"]
    columns = Columns(max_series=5)
    found = packed(columns, *({name: 1.0} for name in (*user, *rules)))
    assert [name for group in found for name in group.values] == [*user[:5], *rules]
    assert (columns.refused["series"], columns.left_out, columns.left_out_count) == (2, user[5:], 2)


def test_nonfinite_loss_and_gradients_are_urgent() -> None:
    assert is_urgent(group(loss=[1.0, math.nan]))
    assert is_urgent(group(**{"grad/norm": [math.inf]}))
    assert is_urgent(group(**{"grad/nonfinite": [0.0, 2.0]}))
    assert not is_urgent(group(loss=[1.0], **{"grad/nonfinite": [0.0]}))
    assert not is_urgent(group(accuracy=[math.nan]))
