from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from perfagent.delivery.columns import Columns, clean_name, is_urgent, merge, number, pack
from perfagent.wire import Event, Frame, Group, decode, encode

LOSS_AND_RATE = ("loss", "lr")


def group(**columns: list[float]) -> Group:
    rows = len(next(iter(columns.values())))
    times = [float(row) for row in range(rows)]
    return Group(step=list(range(rows)), time=times, monotonic=times, values={k: pack(v) for k, v in columns.items()})


def test_rows_of_one_shape_become_one_group_in_order() -> None:
    rows = [(step, 10.0 + step, float(step), LOSS_AND_RATE, (step / 3, 1e-3)) for step in range(5)]
    (found,) = Columns().groups(rows)
    assert list(found.steps()) == [0, 1, 2, 3, 4]
    assert list(found.column("loss")) == [step / 3 for step in range(5)]


def test_rows_of_different_shapes_never_share_a_column() -> None:
    columns = Columns()
    groups = columns.groups(
        [(1, 0.0, 0.0, ("a",), (1.0,)), (2, 0.0, 0.0, ("a", "b"), (2.0, 3.0)), (3, 0.0, 0.0, ("a",), (4.0,))]
    )
    assert [(tuple(g.values), g.rows) for g in groups] == [(("a",), 2), (("a", "b"), 1)]


def test_a_column_is_float32_only_when_that_loses_nothing() -> None:
    assert len(pack([0.5, 1.0, -2.0])) == 12
    assert len(pack([0.1, 1.0])) == 16
    assert len(pack([math.nan, math.inf, -0.0])) == 12
    assert len(pack([1e300])) == 8
    assert math.copysign(1.0, struct.unpack("<f", pack([-0.0]))[0]) == -1.0


@given(st.lists(st.floats(width=64), min_size=1, max_size=20))
def test_every_float_comes_back_bit_equal(values: list[float]) -> None:
    found = group(x=values).column("x")
    assert [struct.pack("<d", v) for v in found] == [struct.pack("<d", v) for v in values] or any(
        map(math.isnan, values)
    )
    assert [math.isnan(a) or a == b for a, b in zip(values, found, strict=True)] == [True] * len(values)


@pytest.mark.fault
@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (True, 1.0),
        (3, 3.0),
        (2**70, float(2**70)),
        (10**400, math.inf),
        (-(10**400), -math.inf),
        (1e400, math.inf),
        (-math.inf, -math.inf),
        (np.float32(0.1), float(np.float32(0.1))),
        (np.int64(7), 7.0),
        (np.array(2.5), 2.5),
        (np.bool_(True), 1.0),
        (torch.tensor(1.5, dtype=torch.bfloat16), 1.5),
        (torch.tensor(3), 3.0),
        (torch.tensor(True), 1.0),
    ],
)
def test_a19_what_is_one_number_is_stored_exactly(value: Any, expected: float) -> None:
    assert number(value) == expected


@pytest.mark.fault
@pytest.mark.parametrize(
    "value",
    [
        "1.0",
        b"1",
        None,
        1j,
        [1.0],
        {},
        object(),
        np.array([1.0]),
        torch.ones(1),
        torch.ones(2),
        torch.tensor(1j),
        np.str_("x"),
    ],
)
def test_a19_what_is_no_number_is_refused_and_counted(value: Any) -> None:
    columns = Columns()
    groups = columns.groups([(1, 0.0, 0.0, {"ok": 1.0, "bad": value})])
    assert [tuple(g.values) for g in groups] == [("ok",)]
    assert columns.refused["kind"] == 1


@pytest.mark.parametrize(
    ("key", "value", "described"),
    [
        ("epoch", "one", "'epoch' (a value of type str)"),
        # all that log() keeps of one with several elements
        ("scores", torch.Tensor, "'scores' (a value of type Tensor)"),
        ((1, 2), None, "a name of type tuple (a value of type NoneType)"),
    ],
)
def test_the_first_value_that_is_no_number_is_told_with_its_type(key: Any, value: Any, described: str) -> None:
    columns = Columns()
    columns.groups([(1, 0.0, 0.0, {"ok": 1.0, key: value}), (2, 0.0, 0.0, {"later": None})])
    assert columns.no_number == described


@pytest.mark.fault
def test_a19_nan_and_infinities_are_values_of_their_own() -> None:
    (found,) = Columns().groups([(i, 0.0, 0.0, {"x": v}) for i, v in enumerate((math.nan, math.inf, -math.inf))])
    assert [str(v) for v in found.column("x")] == ["nan", "inf", "-inf"]


@pytest.mark.fault
def test_a19_a_tensor_on_a_device_is_not_read() -> None:
    class OnDevice:
        ndim, dtype, device = 0, torch.float32, torch.device("cuda", 0)

        def item(self) -> float:  # it waits for the device
            read.append(True)
            return 1.0

    read: list[bool] = []
    assert number(OnDevice()) is None
    assert number(torch.empty((), device="meta")) is None
    assert read == []


class Hostile:
    ndim = 0
    dtype = None

    def item(self) -> float:
        raise RuntimeError("no")


def test_an_object_whose_methods_raise_is_refused() -> None:
    assert number(Hostile()) is None


def test_a_wrong_value_in_a_row_of_the_session_costs_only_itself() -> None:
    columns = Columns()
    groups = columns.groups([(1, 0.0, 0.0, LOSS_AND_RATE, (0.5, None)), (2, 0.0, 0.0, LOSS_AND_RATE, (0.25, 1e-3))])
    found = {
        (step, name): v for g in groups for name in g.values for step, v in zip(g.steps(), g.column(name), strict=True)
    }
    assert found == {(1, "loss"): 0.5, (2, "loss"): 0.25, (2, "lr"): 1e-3}
    assert columns.refused["kind"] == 1


def test_a_step_beyond_64_bits_is_refused() -> None:
    columns = Columns()
    assert columns.groups([(2**63, 0.0, 0.0, {"x": 1.0})]) == []
    assert columns.refused["step"] == 1


@pytest.mark.fault
@pytest.mark.parametrize(
    "name",
    [
        "x" * 10_000,
        "a\0b",
        "\ud800",
        "\u202eabc",
        "📉/loss",
        "../../etc/passwd",
        "<script>alert(1)</script>",
        "Ω" * 500,
        "\n",
    ],
)
def test_a20_any_name_travels_within_256_bytes(name: str) -> None:
    clean = clean_name(name)
    assert clean
    assert len(clean.encode()) <= 256
    assert "\0" not in clean
    groups = Columns().groups([(1, 0.0, 0.0, {name: 1.0})])
    frame = Frame(
        project="p", run="r", source="s", attempt=1, rank=0, seq=1, groups=groups, events=[Event(kind="log", time=0.0)]
    )
    assert list(decode(encode(frame)).groups[0].values) == [clean]


@pytest.mark.fault
def test_a20_an_empty_name_is_refused() -> None:
    columns = Columns()
    assert columns.groups([(1, 0.0, 0.0, {"": 1.0})]) == []
    assert columns.refused["name"] == 1


@pytest.mark.fault
def test_a20_series_beyond_the_limit_are_left_out_and_counted() -> None:
    columns = Columns(max_series=2000)
    rows = [(1, 0.0, 0.0, {f"series/{n}": 1.0}) for n in range(100_000)]
    assert len(columns.groups(rows)) == 2000
    assert columns.refused["series"] == 98_000
    assert len(columns._names) <= 4000


@pytest.mark.fault
def test_a20_names_that_change_all_the_time_are_not_kept() -> None:
    columns = Columns(max_series=10)
    long = "x" * 256
    columns.groups([(1, 0.0, 0.0, {f"{long}{n}": 1.0}) for n in range(1000)])  # stored under one name
    assert len(columns._names) <= 20
    columns.groups([(1, 0.0, 0.0, (f"series/{n}",), (1.0,)) for n in range(10_000)])
    assert len(columns._shapes) <= 5000


def test_nonfinite_loss_and_gradients_are_urgent_and_others_are_not() -> None:
    assert is_urgent(group(loss=[1.0, math.nan]))
    assert is_urgent(group(**{"grad/norm": [math.inf]}))
    assert is_urgent(group(**{"grad/nonfinite": [0.0, 2.0]}))
    assert not is_urgent(group(loss=[1.0], **{"grad/nonfinite": [0.0]}))
    assert not is_urgent(group(accuracy=[math.nan]))


def test_merging_widens_a_column_where_one_part_is_wide() -> None:
    (found,) = merge([group(x=[0.5]), group(x=[0.1]), group(x=[2.0])])
    assert list(found.column("x")) == [0.5, 0.1, 2.0]
    assert len(found.values["x"]) == 24


READ_BY_RULES = (
    "loss",
    "agent/dropped",
    "phase/mine_s",
    "grad_norm/0.weight",
    "node_gpu1/power_w",
    "train/loss",
    "val/loss",
)


def test_names_of_the_user_leave_room_for_what_rules_read() -> None:
    columns = Columns(max_series=5)
    user = [f"task/{n}" for n in range(7)]
    assert [columns.name(name) for name in (*user, *READ_BY_RULES)] == [*user[:5], None, None, *READ_BY_RULES]
    assert columns.refused["series"] == 2
    assert columns.left_out == user[5:]


def test_layers_leave_room_for_the_catalogue_and_for_the_user() -> None:
    columns = Columns(max_series=2)
    names = ("grad_norm/a", "grad_norm/b", "grad_norm/c", "grad/norm", "step_time_s", "mine")
    assert [columns.name(name) for name in names] == [
        "grad_norm/a",
        "grad_norm/b",
        None,
        "grad/norm",
        "step_time_s",
        "mine",
    ]


def test_names_that_cannot_be_stored_are_counted_once_and_none_is_a_name() -> None:
    """A shape of names is looked at as a whole first: that counts nothing."""
    columns = Columns(max_series=2)
    bad = [
        (1, 1.0, 1.0, ("a", ""), [1.0, 2.0]),
        (1, 1.0, 1.0, ("a", None), [1.0, 2.0]),
        (1, 1.0, 1.0, ("b", "c"), [1.0, 2.0]),
    ]
    groups = columns.groups(bad)
    assert {name for group in groups for name in group.values} == {"a", "b"}
    assert columns.refused == {"name": 2, "series": 1}
