"""Frames that wait are smaller than their columns: steps and values the same to the last bit, clocks to half a
millisecond."""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence

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


def whole(group: Group) -> tuple[object, ...]:
    return group.step, [*group.values.items()]


def are_close(clock: Sequence[float], other: Sequence[float]) -> bool:
    """The same time, or what is none the same to the last bit."""
    return all(
        abs(a - b) <= 2 * HALF_A_TICK_S
        if abs(a) < 2**38 and abs(b) < 2**38
        else struct.pack("d", a) == struct.pack("d", b)
        for a, b in zip(clock, other, strict=True)
    )


def come_back(given: list[Group]) -> bool:
    found = columns(planes(given))
    return [whole(group) for group in found] == [whole(group) for group in given] and all(
        are_close(after.monotonics(), before.monotonics()) and are_close(after.times(), before.times())
        for after, before in zip(found, given, strict=True)
    )


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
    off = [after - before for after, before in zip(found.monotonics(), given.monotonics(), strict=True)]
    assert max(map(abs, off)) <= HALF_A_TICK_S + 1e-9
    assert [*found.monotonics()] == sorted(found.monotonics())
    off = [after - before for after, before in zip(found.times(), given.times(), strict=True)]
    assert max(map(abs, off)) <= HALF_A_TICK_S + 1e-6
