"""A random history of a run, in the store and in a plain list side by side: every answer must be that of the list.

Frames come late, out of order and twice. Values are float32 or float64, and among them are infinity and NaN with payloads.
The compactor runs at any time, and takes little at once. New attempts cut older ones. The same test runs on every engine:
SQLite, PostgreSQL (--postgresql) and ClickHouse (--clickhouse).
"""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from frames import BEGIN, frame, state

from perfagent.wire import Frame, Group

NAMES = ("loss", "grad/norm", "a", "b", "c", "d", "e", "f", "g")
SEEDS = [pytest.param(seed, marks=[pytest.mark.long] if seed >= 1 else []) for seed in range(60)]
VALUES = (0.0, -0.0, 1.0, -1.5, 1e300, -1e300, 5e-324, math.inf, -math.inf, math.nan)
ODD_NANS = (0x7FF8000000000001, 0xFFF80000DEADBEEF, 0x7FFFFFFFFFFFFFFF)


@dataclass
class Model:
    """What must be visible."""

    samples: list[tuple[str, int, int, int, float, bytes]] = field(default_factory=list)
    """Name, rank, attempt, step, time and the eight bytes of the value."""
    starts: dict[int, int] = field(default_factory=dict)

    def visible(self, name: str, rank: int | None = None) -> list[tuple[int, float, bytes, int]]:
        """(step, time, value, rank)"""
        found = []
        for of, sender, attempt, step, time, value in self.samples:
            cut = min((start for later, start in self.starts.items() if later > attempt), default=1 << 62)
            if of == name and rank in (None, sender) and step < cut:
                found.append((step, time, value, sender))
        return found


@pytest.mark.parametrize("seed", SEEDS)
def test_every_answer_is_that_of_a_plain_list(shelf, seed: int) -> None:
    random_of = random.Random(seed)
    model = Model()
    shelf.compactor.policy = replace(shelf.compactor.policy, rows_at_once=random_of.choice([1, 3, 64]))
    seqs: dict[str, Iterator[int]] = {}
    kept: list[Frame] = []
    late: list[Frame] = []
    attempt, start = 1, 0
    reach = random_of.choice([40, 600, 6000, 30_000])
    model.starts[1] = 0
    shelf.append(_begins(attempt, start, seqs))
    for _ in range(random_of.randint(20, 50)):
        what = random_of.random()
        if what < 0.60:
            sent = _frame(random_of, attempt, start, reach, seqs)
            if random_of.random() < 0.2:
                late.append(sent)
            else:
                _take(shelf, model, kept, sent)
        elif what < 0.66 and late:
            _take(shelf, model, kept, late.pop(random_of.randrange(len(late))))
        elif what < 0.71 and kept:
            again = random_of.choice(kept)
            assert [receipt.stored for receipt in shelf.append(again)] == [0]
        elif what < 0.90:
            shelf.compactor.run_once(everything=random_of.random() < 0.8)
        elif what < 0.94 and attempt < 4:
            attempt, start = attempt + 1, random_of.randrange(reach)
            model.starts[attempt] = start
            shelf.append(_begins(attempt, start, seqs))
        _check_a_range(shelf, model, random_of)
    for sent in late:
        _take(shelf, model, kept, sent)
    _check_all(shelf, model)
    shelf.compact()
    _check_all(shelf, model)
    for _ in range(5):
        _check_a_range(shelf, model, random_of)


def _begins(attempt: int, start: int, seqs: dict[str, Iterator[int]]) -> Frame:
    source = f"s{attempt}-0"
    event = state("starting", start_step=start)
    return frame(_next(seqs, source), event, run="run", source=source, attempt=attempt, sent=BEGIN)


def _next(seqs: dict[str, Iterator[int]], source: str) -> int:
    return next(seqs.setdefault(source, iter(range(1, 1 << 20))))


def _frame(random_of: random.Random, attempt: int, start: int, reach: int, seqs: dict[str, Iterator[int]]) -> Frame:
    rank = random_of.choice([0, 0, 1, 2])
    groups = []
    for _ in range(random_of.randint(1, 2)):
        rows = random_of.choice([1, 1, 3, 20, 200, 1500])
        first = start + random_of.randrange(reach)
        step = [first + at for at in range(rows)]
        if random_of.random() < 0.3:
            random_of.shuffle(step)
        time = [BEGIN + each * 0.25 + random_of.random() / 100 for each in step]
        names = random_of.sample(NAMES, random_of.choice([1, 2, 9]))
        values = {name: _values(random_of, rows) for name in names}
        stamp = np.array(time).tobytes()
        groups.append(Group(np.array(step, "<i8").tobytes(), stamp, stamp, values))
    source = f"s{attempt}-{rank}"
    return Frame(
        project="p",
        run="run",
        source=source,
        attempt=attempt,
        rank=rank,
        seq=_next(seqs, source),
        groups=groups,
        sent=BEGIN,
    )


def _values(random_of: random.Random, rows: int) -> bytes:
    kind = "<f4" if random_of.random() < 0.6 else "<f8"
    column = np.array([random_of.uniform(-10, 10) for _ in range(rows)], kind)
    for _ in range(random_of.choice([0, 0, 1, 3])):
        with np.errstate(over="ignore", under="ignore"):
            column[random_of.randrange(rows)] = random_of.choice(VALUES)
    if kind == "<f8" and random_of.random() < 0.3:
        column.view("<u8")[random_of.randrange(rows)] = random_of.choice(ODD_NANS)
    return column.tobytes()


def _take(shelf, model: Model, kept: list[Frame], sent: Frame) -> None:
    kept.append(sent)
    for group in sent.groups:
        step, time = np.frombuffer(group.step, "<i8"), np.frombuffer(group.time, "<f8")
        for name, column in group.values.items():
            wide = np.frombuffer(column, f"<f{len(column) // len(step)}").astype("<f8")
            for at in range(len(step)):
                sample = (name, sent.rank, sent.attempt, int(step[at]), float(time[at]), wide[at : at + 1].tobytes())
                model.samples.append(sample)
    [receipt] = shelf.append(sent)
    assert receipt.stored == sent.samples


def _check_a_range(shelf, model: Model, random_of: random.Random) -> None:
    name = random_of.choice(NAMES)
    rank = random_of.choice([0, 1, "all"])
    samples = model.visible(name, None if rank == "all" else rank)
    points = random_of.choice([1, 3, 10, 100, 1000])
    first = last = None
    if samples and random_of.random() < 0.7:
        low, high = min(samples)[0], max(samples)[0]
        first, last = sorted((random_of.randint(low, high), random_of.randint(low, high)))
    answer = shelf.store.series("run", name, rank=rank, from_step=first, to_step=last, points=points)
    inside = [item for item in samples if (first is None or item[0] >= first) and (last is None or item[0] <= last)]
    assert len(answer.step) <= points
    assert sum(answer.count) == len(inside)
    values = [struct.unpack("<d", item[2])[0] for item in inside]
    assert sum(answer.nonfinite) == sum(not math.isfinite(value) for value in values)
    if answer.exact or rank == "all":
        return
    width = answer.bucket_steps
    buckets: dict[int, list[float]] = {}
    times: dict[int, float] = {}
    for (step, time, _, _), value in zip(inside, values, strict=True):
        buckets.setdefault(step // width, []).append(value)
        times[step // width] = min(times.get(step // width, math.inf), time)
    assert [step // width for step in answer.step] == sorted(buckets)
    assert answer.time is not None
    rows = zip(
        answer.step, answer.min, answer.max, answer.mean, answer.count, answer.nonfinite, answer.time, strict=True
    )
    for step, low, high, mean, count, nonfinite, time in rows:
        bucket = buckets[step // width]
        finite = [value for value in bucket if math.isfinite(value)]
        assert (count, nonfinite, time) == (len(bucket), len(bucket) - len(finite), times[step // width])
        if not finite:
            assert math.isnan(low)
            assert math.isnan(high)
            assert math.isnan(mean)
            continue
        assert (low, high) == (min(finite), max(finite))
        exact = math.fsum(finite) / len(finite)
        assert math.isclose(mean, exact, rel_tol=1e-9, abs_tol=1e-12 * max(map(abs, finite)))


def _check_all(shelf, model: Model) -> None:
    """Every sample, bit by bit."""
    found: dict[tuple[str, int], list[tuple[int, float, bytes]]] = {}
    for row in shelf.store.samples("run"):
        found.setdefault((row.name, row.rank), []).append((row.step, row.time, struct.pack("<d", row.value)))
    for name in NAMES:
        for rank in (0, 1, 2):
            expected = sorted((step, time, value) for step, time, value, _ in model.visible(name, rank))
            got = found.pop((name, rank), [])
            assert [item[:2] for item in got] == [item[:2] for item in expected]
            assert sorted(got) == expected
    assert not found
    newest = shelf.store.latest("run")
    for name in NAMES:
        visible = model.visible(name)
        assert (name in newest) == bool(visible)
