"""Frames that wait are smaller than their columns: steps and values the same to the last bit, clocks to half a
millisecond."""

from __future__ import annotations

import base64
import contextlib
import math
import random
import struct
import zlib
from collections.abc import Sequence
from itertools import pairwise

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from perfagent.delivery.backlog import squeezed, unsqueezed
from perfagent.delivery.byte_planes import Planes, columns, deflated, planes
from perfagent.delivery.segments import BAD_RECORD
from perfagent.wire import Event, Group

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


@pytest.mark.parametrize("rows", [999, 1000, 1001, 9000])
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


moments = st.one_of(
    st.floats(-4e9, 4e9),  # before 1970, and what a clock that was never set says
    st.floats(-(2.0**38) + 1, 2.0**38 - 1),
    st.floats(1.79e9, 1.79e9 + 1e-3),  # many in one tick
)


@settings(deadline=None)
@given(st.lists(st.tuples(moments, moments), min_size=1, max_size=20))
def test_clocks_that_jump_are_followed_and_order_is_kept(rows):
    clock, times = zip(*rows, strict=True)
    given = Group(step=list(range(len(rows))), time=times, monotonic=clock, values={"x": clock})
    (found,) = columns(planes([given]))
    assert whole(found) == whole(given)
    assert all(abs(a - b) <= HALF_A_TICK_S + 2**-14 for a, b in zip(found.monotonics(), clock, strict=True))
    assert all(abs(a - b) <= 2 * HALF_A_TICK_S + 2**-12 for a, b in zip(found.times(), times, strict=True))
    order = [(a > b) - (a < b) for a, b in pairwise(clock)]
    after = [(a > b) - (a < b) for a, b in pairwise(found.monotonics())]
    assert all(now in (0, before) for now, before in zip(after, order, strict=True)), (
        "a row is before one that it came after"
    )


def test_values_stay_as_they_are_where_that_is_smaller() -> None:
    group = clocked(6000)
    accuracy = group.values["accuracy"]
    group.values = {"accuracy": accuracy}
    kept = planes([group])
    assert kept.plain == deflated(accuracy)
    assert not kept.wide
    assert sum(map(len, kept.clocks)) < 0.5 * 6000, "clocks are half a byte a row, and 24 as they are"


@pytest.mark.parametrize(
    "clock", [[math.nan, 1.0], [math.inf, 1.0], [-0.0, 0.0], [1e-10, 1.0], [1e300, -1e300], [0.3, 9e9]]
)
def test_clock_that_is_none_comes_back_as_it_was(clock: list[float]) -> None:
    group = Group(step=[1, 2], time=[math.nan, -math.inf], monotonic=clock, values={"x": [1.0, 2.0]})
    assert [(one.time, one.monotonic, *whole(one)) for one in columns(planes([group]))] == [
        (group.time, group.monotonic, *whole(group))
    ]


EARLIER = (
    "k^qsF2MNNJ#3y(Gn>3aA@M*_eYed|CNP13Ol9OLtys&&K<Dt_GP%vQu03G-ZmYBp8cmZQ%Vix`XhJmq$g@FM85q1KI#1wb|V_;zD"
    "eei{W!H0o?0RR)-0<OdocmZQzVBr4R4<r~E7yt|`0h`1WcmZQzV7SN1!oaYHfq?-43l0IK#1VJ_V_;yI$N&VaKnwr{IRKZ$4tN1$"
    "U|=v~fC2yk@&Gr)4R`@#V1R)i8~_3Y0RhAfcmZQzfPs1j009aBfSAM!cmXqEU<3dFpa3?+3wQxDW?%pS0Gt3c#0z)<GiG1_005i-"
    "G{g&d0W)S`0001-05rr4cmXqJU;qFBoB%Y$3wQxDW?%pS0Gt3c#0z)<EB?R$00TS$WW)=20jvMd000Ai0e_Ih2zUVl000000mL|X"
    "0h`#mBs()NWocqgYEj9OlFZ!H)Ak=2z+g#nNov7?mAUzO`6c;znaKy1q$HLkHUI!7sTGI"
)
"""A record as agents wrote it whose frames kept clocks to the nanosecond."""


def test_frame_from_before_an_upgrade_is_read_to_the_last_bit() -> None:
    replaces, ((seq, upto, thinned, found, events),) = unsqueezed(base64.b85decode(EARLIER))
    assert (replaces, seq, upto, thinned, [event.kind for event in events]) == (0, 7, 9, False, ["alert"])
    given = [
        Group(
            step=[1, 2, 3],
            time=[1.79e9, 1.79e9 + 0.1, 1.79e9 - 3600],
            monotonic=[60000.123456789, 60000.223456788, 60000.3],
            values={"loss": [0.1, math.nan, -0.0]},
        ),
        Group(step=[4], time=[math.inf], monotonic=[math.nan], values={}),
    ]
    assert [(group.time, group.monotonic, *whole(group)) for group in found] == [
        (group.time, group.monotonic, *whole(group)) for group in given
    ]
    parts = [(3, 7, False, [clocked(5)], [Event(kind="alert", time=1.0)])]  # of an agent before that
    assert unsqueezed(zlib.compress(msgspec.msgpack.encode((2, parts)), 1)) == (2, parts)


@settings(max_examples=100, deadline=None)
@given(st.randoms(use_true_random=False))
def test_damaged_record_is_one_of_the_known_errors(chance: random.Random) -> None:
    """The checksum lets none of them through; whatever would must not stop the start."""
    payload = bytearray(squeezed((0, [(1, 2, False, [clocked(8)], [Event(kind="alert", time=1.0)])])))
    for _ in range(chance.randrange(1, 4)):
        payload[chance.randrange(len(payload))] ^= 1 << chance.randrange(8)
    with contextlib.suppress(*BAD_RECORD):
        unsqueezed(bytes(payload))


@pytest.mark.parametrize(
    "shape",
    [
        [1, 1024, 0.0, ["x"], "?"],
        [-1, 0, 0.0, [], ""],
        [10**12, 0, 0.0, [], ""],
        [2**62, 1024, math.nan, ["x"], "w"],
        [1, 1024, 0.0, ["x", "y"], "w"],
        [1, 1024, 0.0, list("abcdefg"), 7 * "N"],
    ],
)
def test_columns_that_do_not_belong_together_are_an_error(shape: list[object]) -> None:
    good = planes([clocked(1)])
    with pytest.raises(ValueError):
        columns(Planes(deflated(msgspec.msgpack.encode([shape])), good.clocks, good.wide, good.narrow, good.plain))
