from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from perfagent.delivery.columns import Columns, clean_name, is_urgent, merge, number, pack
from perfagent.wire import Event, Frame, Group, decode, encode


def group(**columns: list[float]) -> Group:
    rows = len(next(iter(columns.values())))
    times = [float(row) for row in range(rows)]
    return Group(step=list(range(rows)), time=times, monotonic=times, values={k: pack(v) for k, v in columns.items()})


def logged(*rows: dict[Any, Any]) -> list[tuple[Any, ...]]:
    return [(step, 0.0, 0.0, values) for step, values in enumerate(rows, start=1)]


def test_rows_of_one_shape_become_one_group_in_order() -> None:
    """A value that is no number costs only itself."""
    rows = [(step, 10.0 + step, float(step), {"loss": step / 3, "lr": 1e-3}) for step in range(5)]
    columns = Columns()
    (found,) = columns.groups(rows)
    assert list(found.steps()) == [0, 1, 2, 3, 4]
    assert list(found.column("loss")) == [step / 3 for step in range(5)]
    assert (found.times()[4], found.monotonics()[4]) == (14.0, 4.0)
    first, second = columns.groups(logged({"loss": 0.5, "lr": None}, {"loss": 0.25, "lr": 1e-3}))
    assert [{name: [*group.column(name)] for name in group.values} for group in (first, second)] == [
        {"loss": [0.5]}, {"loss": [0.25], "lr": [pytest.approx(1e-3)]},
    ]  # fmt: skip
    assert columns.refused == {"kind": 1}


def same(one: float, other: float) -> bool:
    return struct.pack("<d", one) == struct.pack("<d", other) or (math.isnan(one) and math.isnan(other))


def test_column_is_float32_only_when_that_loses_nothing() -> None:
    sizes = {12: [0.5, 1.0, -2.0], 16: [0.1, 1.0], 8: [1e300], 4: [-0.0]}
    assert {len(pack(values)): values for values in sizes.values()} == sizes
    assert len(pack([math.nan, math.inf, -0.0])) == 12


@given(st.lists(st.floats(width=64), min_size=1, max_size=20))
def test_every_float_comes_back_bit_equal(values: list[float]) -> None:
    assert all(map(same, group(x=values).column("x"), values))


def test_merging_widens_a_column_where_one_part_is_wide() -> None:
    (found,) = merge([group(x=[0.5]), group(x=[0.1]), group(x=[2.0])])
    assert list(found.column("x")) == [0.5, 0.1, 2.0]
    assert len(found.values["x"]) == 24


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
    (found,) = columns.groups(logged({"x": value}))
    assert same(found.column("x")[0], expected(value))
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
    columns = Columns()
    for count, value in enumerate(REFUSED, start=1):
        assert number(value) is None
        assert [tuple(g.values) for g in columns.groups(logged({"ok": 1.0, "bad": value}))] == [("ok",)], value
        assert columns.refused == {"kind": count}


def test_step_beyond_64_bits_is_refused() -> None:
    columns = Columns()
    for step in (2**63, -(2**63) - 1, 1.5, "1"):
        assert columns.groups([(step, 0.0, 0.0, {"x": 1.0})]) == []
    assert columns.refused["step"] == 4
    (found,) = columns.groups([(step, 0.0, 0.0, {"x": 1.0}) for step in (2**63 - 1, -(2**63))])
    assert list(found.steps()) == [2**63 - 1, -(2**63)]


# ---- A20: names

NAMES = (
    "x" * 10_000, "a\0b", "\ud800", "\u202eabc", "📉/loss", "../../etc/passwd", "<script>alert(1)</script>", "Ω" * 500, "\n",
)  # fmt: skip


@pytest.mark.fault
@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_a20_any_name_travels_within_256_bytes(name: str) -> None:
    clean = clean_name(name)
    assert clean
    assert len(clean.encode()) <= 256
    assert "\0" not in clean
    frame = Frame(
        project="p", run="r", source="s", attempt=1, rank=0, seq=1, groups=Columns().groups(logged({name: 1.0})),
        events=[Event(kind="log", time=0.0)],
    )  # fmt: skip
    assert list(decode(encode(frame)).groups[0].values) == [clean]


@pytest.mark.fault
def test_a20_series_beyond_the_limit_are_left_out_and_counted() -> None:
    """Those of the user leave room for what rules read."""
    columns = Columns(max_series=5)
    user = [f"task/{n}" for n in range(7)]
    read = (
        "loss",
        "agent/dropped",
        "phase/mine_s",
        "grad_norm/0.weight",
        "node_gpu1/power_w",
        "train/loss",
        "val/loss",
    )
    found = columns.groups(logged(*({name: 1.0} for name in (*user, *read))))
    assert [name for group in found for name in group.values] == [*user[:5], *read]
    assert (columns.refused["series"], columns.left_out, columns.left_out_count) == (2, user[5:], 2)


def test_nonfinite_loss_and_gradients_are_urgent() -> None:
    assert is_urgent(group(loss=[1.0, math.nan]))
    assert is_urgent(group(**{"grad/norm": [math.inf]}))
    assert is_urgent(group(**{"grad/nonfinite": [0.0, 2.0]}))
    assert not is_urgent(group(loss=[1.0], **{"grad/nonfinite": [0.0]}))
    assert not is_urgent(group(accuracy=[math.nan]))
