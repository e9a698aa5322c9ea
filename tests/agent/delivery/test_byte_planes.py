"""Frames that wait are smaller than their columns: steps and values the same to the last bit, clocks to half a
millisecond."""

from __future__ import annotations

import random
import struct

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from perfagent.delivery.byte_planes import columns, planes
from perfagent.wire import Group

bits = st.one_of(
    st.integers(0, 2**64 - 1),
    st.floats().map(lambda number: int.from_bytes(struct.pack("<d", number), "little")),
    st.floats(0, 1e6).map(lambda number: int.from_bytes(struct.pack("<d", round(number * 1e9) / 1e9), "little")),
)


@st.composite
def groups(draw: st.DrawFn) -> Group:
    rows = draw(st.integers(0, 5))

    def column(width: int) -> bytes:
        numbers = draw(st.lists(bits, min_size=rows, max_size=rows))
        return b"".join(number.to_bytes(8, "little")[:width] for number in numbers)

    names = draw(st.dictionaries(st.text(max_size=3), st.sampled_from([4, 8]), max_size=4))
    return Group(
        step=column(8), time=column(8), monotonic=column(8), values={name: column(names[name]) for name in names}
    )


HALF_A_TICK_S = 0.5 / 1024


def come_back(given: list[Group]) -> bool:
    """Steps and values to the last bit, and so what is no time; else the same time."""
    found = columns(planes(given))
    for after, before in zip(found, given, strict=True):
        assert (after.step, [*after.values.items()]) == (before.step, [*before.values.items()])
        for clock, other in ((after.monotonics(), before.monotonics()), (after.times(), before.times())):
            for a, b in zip(clock, other, strict=True):
                is_time = abs(a) < 2**38 and abs(b) < 2**38
                assert abs(a - b) <= 2 * HALF_A_TICK_S if is_time else struct.pack("d", a) == struct.pack("d", b)
    return True


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # its first example loads all of Unicode
@given(st.lists(groups(), max_size=4))
def test_any_columns_come_back_to_the_last_bit(given: list[Group]) -> None:
    assert come_back(given)


def clocked(rows: int) -> Group:
    """What a training gives: a clock in whole nanoseconds, a time that follows it, a loss, a learning rate."""
    noise = random.Random(0)
    clock = [(6 * 10**13 + step * 10**7 + noise.randrange(10**6)) / 1e9 for step in range(rows)]
    loss = [2.0 + noise.gauss(0, 0.01) for _ in range(rows)]
    accuracy = [round(noise.random(), 3) for _ in range(rows)]
    values = {"loss": loss, "accuracy": accuracy, "lr": [3e-4] * rows}
    return Group(step=list(range(rows)), time=[1.79e9 + at for at in clock], monotonic=clock, values=values)


@pytest.mark.parametrize("rows", [1000, 1001])
def test_row_comes_back_at_its_time_to_half_a_millisecond(rows: int) -> None:
    """And never before the one before, whatever the length of the columns."""
    given = clocked(rows)
    assert come_back([given, clocked(3)])
    (found,) = columns(planes([given]))
    assert [*found.monotonics()] == sorted(found.monotonics())
    for clock, other in ((found.monotonics(), given.monotonics()), (found.times(), given.times())):
        assert max(abs(after - before) for after, before in zip(clock, other, strict=True)) <= HALF_A_TICK_S + 1e-6
