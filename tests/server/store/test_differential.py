"""A random history of a run, in the store and in a plain list side by side: every answer must be that of the list.

Frames come late, out of order and twice, of a few names or of so many that they lie in bundles. Values are float32 or
float64, and among them are infinity and NaN with payloads. The compactor runs at any time, and takes little at once. New
attempts cut older ones. The same test runs on every engine: SQLite, PostgreSQL (--postgresql) and ClickHouse (--clickhouse).
"""

from __future__ import annotations

import math
import random
import struct
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
from frames import BEGIN, frame, state

from perfagent.wire import Frame, Group

NAMES = [f"m{at}" for at in range(45)]
FEW = NAMES[:9]
SEEDS = [pytest.param(seed, marks=[pytest.mark.long] if seed >= 2 else []) for seed in range(60)]
VALUES = (0.0, -0.0, 1.0, -1.5, 1e300, -1e300, 5e-324, math.inf, -math.inf, math.nan)
ODD_NANS = (0x7FF8000000000001, 0xFFF80000DEADBEEF, 0x7FFFFFFFFFFFFFFF)


class History:
    """What was sent, and what of it must be visible."""

    def __init__(self, shelf, seed: int) -> None:
        self.shelf, self.random = shelf, random.Random(seed)
        self.reach = self.random.choice([40, 600, 6000, 30_000])
        self.attempt, self.starts = 0, dict[int, int]()
        self.sent: list[Frame] = []
        self.late: list[Frame] = []
        self.samples = defaultdict[tuple[str, int], list[tuple[int, int, float, bytes]]](list)
        """Of a name and rank: attempt, step, time and the eight bytes of the value."""
        self.seqs = defaultdict[str, int](int)

    def visible(self, name: str, rank: int | None = None) -> list[tuple[int, float, bytes]]:
        """Step, time and value."""
        cuts = {
            one: min((self.starts[later] for later in self.starts if later > one), default=1 << 62)
            for one in self.starts
        }
        ranks = (0, 1, 2) if rank is None else (rank,)
        samples = (sample for sender in ranks for sample in self.samples[name, sender])
        return [(step, time, value) for attempt, step, time, value in samples if step < cuts[attempt]]

    def begin_attempt(self) -> None:
        self.attempt += 1
        start = self.starts[self.attempt] = self.random.randrange(self.reach) if self.attempt > 1 else 0
        self.shelf.append(self.frame(0, state("starting", start_step=start)))

    def frame(self, rank: int, *pieces) -> Frame:
        source = f"s{self.attempt}-{rank}"
        self.seqs[source] += 1
        return frame(self.seqs[source], *pieces, run="run", source=source, attempt=self.attempt, rank=rank, sent=BEGIN)

    def make(self) -> Frame:
        return self.frame(self.random.choice([0, 0, 1, 2]), *(self.group() for _ in range(self.random.randint(1, 2))))

    def group(self) -> Group:
        count = self.random.choice([1, 1, 3, 20, 200, 1500])
        of = NAMES if count <= 20 and self.random.random() < 0.5 else FEW
        first = self.starts[self.attempt] + self.random.randrange(self.reach)
        step = [first + at for at in range(count)]
        if self.random.random() < 0.3:
            self.random.shuffle(step)
        stamp = np.array([BEGIN + each * 0.25 + self.random.random() / 100 for each in step]).tobytes()
        names = self.random.sample(of, self.random.choice([1, 2, len(of)]))
        return Group(np.array(step, "<i8").tobytes(), stamp, stamp, {name: self.values(count) for name in names})

    def values(self, count: int) -> bytes:
        kind = "<f4" if self.random.random() < 0.6 else "<f8"
        column = np.array([self.random.uniform(-10, 10) for _ in range(count)], kind)
        with np.errstate(over="ignore", under="ignore"):
            for _ in range(self.random.choice([0, 0, 1, 3])):
                column[self.random.randrange(count)] = self.random.choice(VALUES)
        if kind == "<f8" and self.random.random() < 0.3:
            column.view("<u8")[self.random.randrange(count)] = self.random.choice(ODD_NANS)
        return column.tobytes()

    def take(self, sent: Frame) -> None:
        self.sent.append(sent)
        for group in sent.groups:
            step, time = np.frombuffer(group.step, "<i8").tolist(), np.frombuffer(group.time, "<f8").tolist()
            for name, column in group.values.items():
                wide = np.frombuffer(column, f"<f{len(column) // len(step)}").astype("<f8")
                its = zip(step, time, (value.tobytes() for value in wide), strict=True)
                self.samples[name, sent.rank] += ((sent.attempt, *sample) for sample in its)
        [receipt] = self.shelf.append(sent)
        assert receipt.stored == sent.samples

    def go_on(self) -> None:
        """One event of the history."""
        what = self.random.random()
        if what < 0.60:
            sent = self.make()
            if self.random.random() < 0.2:
                self.late.append(sent)
            else:
                self.take(sent)
        elif what < 0.66 and self.late:
            self.take(self.late.pop(self.random.randrange(len(self.late))))
        elif what < 0.71 and self.sent:
            assert [receipt.stored for receipt in self.shelf.append(self.random.choice(self.sent))] == [0]
        elif what < 0.90:
            self.shelf.compactor.run_once(everything=self.random.random() < 0.8)
        elif what < 0.94 and self.attempt < 4:
            self.begin_attempt()

    def check_a_range(self) -> None:
        name, rank = self.random.choice(FEW), self.random.choice([0, 1, "all"])
        samples = self.visible(name, None if rank == "all" else rank)
        points = self.random.choice([1, 3, 10, 100, 1000])
        first = last = None
        if samples and self.random.random() < 0.7:
            ends = min(samples)[0], max(samples)[0]
            first, last = sorted((self.random.randint(*ends), self.random.randint(*ends)))
            samples = [sample for sample in samples if first <= sample[0] <= last]
        answer = self.shelf.store.series("run", name, rank=rank, from_step=first, to_step=last, points=points)
        assert len(answer.step) <= points
        assert sum(answer.count) == len(samples)
        inside = [(step, time, struct.unpack("<d", value)[0]) for step, time, value in samples]
        assert sum(answer.nonfinite) == sum(not math.isfinite(value) for _, _, value in inside)
        if answer.exact or rank == "all":
            return
        width = answer.bucket_steps
        buckets = defaultdict[int, list[tuple[float, float]]](list)
        for step, time, value in inside:
            buckets[step // width].append((time, value))
        assert [step // width for step in answer.step] == sorted(buckets)
        columns = (answer.min, answer.max, answer.mean, answer.count, answer.nonfinite, answer.time)
        for step, *found in zip(answer.step, *columns, strict=True):
            its = buckets[step // width]
            finite = [value for _, value in its if math.isfinite(value)]
            assert found[3:] == [len(its), len(its) - len(finite), min(time for time, _ in its)]
            if not finite:
                assert all(math.isnan(one) for one in found[:3])
                continue
            assert found[:2] == [min(finite), max(finite)]
            exact = math.fsum(finite) / len(finite)
            assert math.isclose(found[2], exact, rel_tol=1e-9, abs_tol=1e-12 * max(map(abs, finite)))

    def check_all(self) -> None:
        """Every sample, bit by bit."""
        found = defaultdict[tuple[str, int], list](list)
        for row in self.shelf.store.samples("run"):
            found[row.name, row.rank].append((row.step, row.time, struct.pack("<d", row.value)))
        for name in NAMES:
            for rank in (0, 1, 2):
                expected, got = sorted(self.visible(name, rank)), found.pop((name, rank), [])
                assert [item[:2] for item in got] == [item[:2] for item in expected]
                assert sorted(got) == expected
        assert not found
        assert {name for name in NAMES if self.visible(name)} == self.shelf.store.latest("run").keys()


@pytest.mark.sql
@pytest.mark.parametrize("seed", SEEDS)
def test_every_answer_is_that_of_a_plain_list(shelf, seed: int) -> None:
    history = History(shelf, seed)
    shelf.compactor.policy = replace(shelf.compactor.policy, rows_at_once=history.random.choice([1, 3, 64]))
    history.begin_attempt()
    for _ in range(history.random.randint(20, 50)):
        history.go_on()
        history.check_a_range()
    for sent in history.late:
        history.take(sent)
    history.check_all()
    shelf.compact()
    history.check_all()
    for _ in range(5):
        history.check_a_range()
