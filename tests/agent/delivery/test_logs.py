"""What a user logs says the same packed as it does call by call."""

from __future__ import annotations

import math
import random
from typing import Any

import msgspec
import pytest

from perfagent.delivery.columns import Columns
from perfagent.delivery.drafts import groups_of, left_behind, read
from perfagent.delivery.logs import Logs
from perfagent.hooks.reading import StepReader

KEYS = ["loss", "acc", "lr", "x" * 300, "new\nline", "", 3, "\ud800", "ünï", None, ("a", 1)]
VALUES = [0.5, 1.0, 1e300, -0.0, math.nan, math.inf, True, 7, 2**60, 2**70, 10**400]


def calls(seed: int, count: int = 60) -> list[tuple[int, float, float, dict[Any, Any]]]:
    one = random.Random(seed)
    shapes = [one.sample(KEYS, one.randint(0, 6)) for _ in range(4)]
    return [
        (
            one.choice([number, number, -5, 2**63]) if one.random() < 0.1 else number, 1000.0 + number, float(number),
            {key: one.random() if one.random() < 0.7 else one.choice(VALUES) for key in one.choice(shapes)},
        )
        for number in range(count)
    ]  # fmt: skip


def pack(rows: list[Any]) -> tuple[list[Any], list[Any]]:
    logs = Logs()
    left = [row for row in rows if not logs.add(row)]
    return left, [*logs.packed()]


def said(groups: list[Any]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for group in groups:
        for name in group.values:
            rows = zip(group.steps(), group.times(), group.monotonics(), group.column(name), strict=True)
            found.setdefault(name, []).extend(map(repr, rows))
    return {name: sorted(rows) for name, rows in found.items()}


@pytest.mark.parametrize("seed", range(40))
def test_packed_and_call_by_call_are_the_same(seed: int) -> None:
    rows = calls(seed)
    alone, together = Columns(), Columns()
    lost: list[Any] = []
    one = groups_of(rows, alone, lost.append)
    left, packed = pack(rows)
    other = read([*left, *packed], StepReader(), together, lost.append)
    assert said(other) == said(one)
    assert sum(alone.refused.values()) == sum(together.refused.values())
    assert not lost


def test_a_call_that_fails_in_its_middle_leaves_nothing_behind() -> None:
    good, bad = (1, 1.0, 1.0, {"a": 1.0, "b": 2.0}), (2, 2.0, 2.0, {"a": 3.0, "b": 10**400})
    left, (packed,) = pack([good, bad, (2**63, 3.0, 3.0, {"a": 1.0, "b": 2.0}), good])
    assert [row[0] for row in left] == [2, 2**63]
    (group,) = read([packed], StepReader(), Columns(), print)
    assert [*group.column("a")] == [1.0, 1.0]
    assert [*group.column("b")] == [2.0, 2.0]
    assert group.rows == 2


def test_keys_that_raise_when_they_are_compared_are_left_alone() -> None:
    class Hostile:
        def __hash__(self) -> int:
            return 7

        def __eq__(self, other: object) -> bool:
            raise RuntimeError("no")

    logs = Logs()
    assert logs.add((1, 1.0, 1.0, {Hostile(): 1.0}))
    assert not logs.add((2, 1.0, 1.0, {Hostile(): 1.0}))


def test_another_process_reads_them_from_a_draft() -> None:
    rows = [(step, 1.0, 2.0, {"loss": step / 3, "epoch": step}) for step in range(5)]
    _, packed = pack(rows)
    written = msgspec.msgpack.decode(msgspec.msgpack.encode((StepReader().context(), packed)))
    (group,) = left_behind([tuple(written)])
    assert [*group.column("loss")] == [step / 3 for step in range(5)]
    assert [*group.column("epoch")] == [0.0, 1.0, 2.0, 3.0, 4.0]
