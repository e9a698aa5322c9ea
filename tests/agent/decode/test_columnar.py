"""Steps read many at once say to the last bit what each says when it is read by itself."""

from __future__ import annotations

import math
import random
from array import array
from collections import deque
from typing import Any

import msgspec
import pytest
from progress import new_progress

from perfagent.decode.step_blocks import StepPacker
from perfagent.decode.step_decoder import StepReader
from perfagent.delivery.columns import Columns
from perfagent.delivery.drafts import Draft, groups_of, is_pressing, read, rows_of
from perfagent.rootcause.investigator import Investigator
from perfagent.signals.batch_size import inputs
from perfagent.signals.flops.op_formulas import Counted
from perfagent.signals.flops.step_flops import StepFlops
from perfagent.step.row import Note
from perfagent.step.trace import (
    BACKWARD,
    BACKWARD_END,
    CLEARED,
    DATA,
    FORWARD,
    OPTIMIZER,
    OPTIMIZER_END,
    PHASE,
    RETURNED,
    trace_of,
)

LOADERS = (7, 8)


class Loop:
    """Makes the notes of a training that keeps its habits for a while and then changes one."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now, self.step = 10**9, 0
        self.habits: dict[str, object] = {}
        self.change()

    def change(self) -> None:
        pick = self.random.choice
        self.habits = {
            "data": pick([None, LOADERS[0], LOADERS[0], LOADERS[1]]),
            "ahead": self.random.random() < 0.1,
            "returned": pick([None, True, False]),
            "cleared": pick([None, "before", "after"]),
            "size": pick([None, (32, None, False), (16, 256, True), (16, 256, False), (None, None, False)]),
            "lr": pick([0.1, 0.1, None]),
            "micro": pick([1, 1, 1, 2]),
            "phase": self.random.random() < 0.1,
            "wall": self.random.random() < 0.5,
            "training": self.random.random() < 0.95,
            "logs": pick([0.02, 0.0, 0.98, 1.0]),
            "honest": self.random.random() < 0.8,
        }

    def tick(self) -> int:
        self.now += self.random.randrange(1, 3_000_000)
        return self.now

    def note(self) -> Note:
        habits, one = self.habits, self.random
        began, trace = self.now if self.step else 0, []
        size, loader = habits["size"], habits["data"]
        for _ in range(habits["micro"]):
            if loader is not None:
                fetches = 2 if habits["ahead"] and one.random() < 0.3 else 1
                trace += [
                    (DATA, self.tick(), self.tick(), loader, size if one.random() < 0.98 else None)
                    for _ in range(fetches)
                ]
            training = habits["training"] or one.random() < 0.5
            trace.append((FORWARD, self.tick(), None, training, None if loader is not None else size))
            if habits["cleared"] == "before":
                trace.append((CLEARED, self.tick(), self.tick()))
            if habits["returned"] is not None:
                trace.append((RETURNED, self.tick(), None, habits["returned"] if one.random() < 0.98 else True))
            if habits["cleared"] == "after":
                trace.append((CLEARED, self.tick(), self.tick()))
            if habits["phase"]:
                trace.append((PHASE, self.tick(), self.tick(), "checkpoint", None, None))
            loss = one.choice([one.random()] * 60 + [math.nan, math.inf, None, 3])
            trace.append((BACKWARD, self.tick(), None, loss, one.random() < 0.2))
            trace.append((BACKWARD_END, self.tick() if one.random() < 0.98 else self.now, None))
        trace.append((OPTIMIZER, self.tick(), None))
        trace.append((OPTIMIZER_END, self.tick() if one.random() < 0.98 else self.now, None))
        self.step += 1
        rare = one.choice(
            [{"grad/norm": 1.0}, {"grad/norm": 2.0, "grad/nonfinite": one.choice([0.0, 0.0, 1.0])}, None, None]
        )
        rare = rare if one.random() < 0.2 else None
        user_loss = None
        if one.random() < habits["logs"]:
            user_loss = loss if habits["honest"] and type(loss) is float else one.random()
        wall = 1000.0 + self.step if habits["wall"] else 0.0
        return Note(self.step, wall, began, habits["micro"], habits["lr"], user_loss, 0, trace_of(trace), rare)

    def notes(self, count: int) -> list[Note]:
        found = []
        for _ in range(count):
            if self.random.random() < 0.03:
                self.change()
            found.append(self.note())
        return found


def packed(notes: list[Note], packer: StepPacker | None = None) -> list[Any]:
    """As the collector packs what it finds in one tick."""
    packer = packer or StepPacker()
    rows: list[Any] = []
    for note in notes:
        if is_pressing(note):
            packer.take(rows)
            rows.append(note)
        else:
            packer.add(note, rows)
    packer.take(rows)
    return rows


def written(rows: list[Any]) -> list[Any]:
    """As they come from a file."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(rows))


class Silent:
    def __init__(self) -> None:
        self.rows: deque = deque()


def reader(*, embedded: bool = False) -> StepReader:
    inputs.changes.clear()  # what other tests fetched
    inputs.changes.append((0, ()))
    made = StepReader()
    made.epoch = 1_000_000.0
    made.account.embedded = embedded
    made.flops = StepFlops(lambda: None, {(32, 0): Counted(products=1e9, attention=0.0)})
    made.investigator = Investigator(new_progress(deque()), Silent(), lambda: None)
    return made


def table(groups) -> dict[str, list[tuple[int, float, float, str]]]:
    found: dict[str, list[tuple[int, float, float, str]]] = {}
    for group in groups:
        steps, times, monotonics = array("q", group.step), array("d", group.time), array("d", group.monotonic)
        for name in group.values:
            found.setdefault(name, []).extend(zip(steps, times, monotonics, map(repr, group.column(name)), strict=True))
    return {name: sorted(rows) for name, rows in found.items()}


def one_by_one(notes, made: StepReader) -> list[Any]:
    lost: list[object] = []
    groups = groups_of(rows_of(notes, made, lost.append), Columns(), lost.append)
    assert not lost
    return groups


def at_once(rows, made: StepReader) -> list[Any]:
    lost: list[object] = []
    groups = read([Draft([], rows)], made, Columns(), lost.append)
    assert not lost
    return groups


def knows(made: StepReader, steps: int) -> list[object]:
    """What a reader has taken from the steps so far for those to come."""
    batches, investigator = made.account.batches, made.investigator
    found: list[object] = [batches.feeding, made.loss_by_user, made.flops.has_seen(steps)]
    found += [batches.has_waiting(loader) for loader in LOADERS]
    return [*found, repr(investigator.history()), [investigator.stays_bad(step) for step in range(steps + 2)]]


@pytest.mark.parametrize("seed", range(6))
def test_whatever_the_loop_does_both_ways_of_reading_agree(seed):
    notes = Loop(seed).notes(320)
    alone, one = reader(embedded=seed % 2 == 0), []
    for begin in range(0, len(notes), 80):
        one += one_by_one(notes[begin : begin + 80], alone)
    together, other, packer = reader(embedded=seed % 2 == 0), [], StepPacker()
    for begin in range(0, len(notes), 80):
        part = notes[begin : begin + 80]
        other += at_once(written(packed(part[:30], packer) + packed(part[30:], packer)), together)
    assert table(other) == table(one)
    assert knows(together, len(notes)) == knows(alone, len(notes))
