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

HALF_A_TICK_S = 0.5 / 1024
bits = st.integers(0, 2**64 - 1) | st.floats().map(lambda one: int.from_bytes(struct.pack("<d", one), "little"))


@st.composite
def groups(draw: st.DrawFn) -> Group:
    rows = draw(st.integers(0, 5))

    def column(width: int) -> bytes:
        numbers = draw(st.lists(bits, min_size=rows, max_size=rows))
        return b"".join(number.to_bytes(8, "little")[:width] for number in numbers)

    names = draw(st.dictionaries(st.text(max_size=3), st.sampled_from([4, 8]), max_size=4))
    time, clock = (draw(st.lists(st.floats(0, 2**32), min_size=rows, max_size=rows)) for _ in range(2))
    return Group(column(8), time, clock, {name: column(names[name]) for name in names})  # type: ignore[arg-type]


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # its first example loads all of Unicode
@given(st.lists(groups(), max_size=4))
def test_any_columns_come_back_and_clocks_to_a_tick(given: list[Group]) -> None:
    found = columns(planes(given))
    for after, before in zip(found, given, strict=True):
        assert (after.step, [*after.values.items()]) == (before.step, [*before.values.items()])
        for clock, other in ((after.monotonics(), before.monotonics()), (after.times(), before.times())):
            assert all(abs(a - b) <= 2 * HALF_A_TICK_S + 1e-5 for a, b in zip(clock, other, strict=True))


@pytest.mark.parametrize("rows", [1000, 1001])
def test_row_comes_back_at_its_time_to_half_a_millisecond(rows: int) -> None:
    """And never before the one before, whatever the length of the columns."""
    noise = random.Random(0)
    clock = [(6 * 10**13 + step * 10**7 + noise.randrange(10**6)) / 1e9 for step in range(rows)]
    given = Group([*range(rows)], [1.79e9 + at for at in clock], clock, {"lr": [3e-4] * rows})  # type: ignore[arg-type]
    (found,) = columns(planes([given]))
    assert [*found.monotonics()] == sorted(found.monotonics())
    for after, before in ((found.monotonics(), given.monotonics()), (found.times(), given.times())):
        assert max(abs(a - b) for a, b in zip(after, before, strict=True)) <= HALF_A_TICK_S + 1e-6
