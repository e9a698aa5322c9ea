"""Steps read many at once say to the last bit what each says when it is read by itself."""

from __future__ import annotations

import math
import random
from array import array
from collections import deque

import pytest
import torch  # noqa: F401 - what devices can do is asked of it

from perfagent.delivery.columns import Columns
from perfagent.delivery.drafts import Draft, groups_of, read, rows_of
from perfagent.hooks.account import BACKWARD, BACKWARD_END, CLEARED, DATA, FORWARD, OPTIMIZER, OPTIMIZER_END, PHASE, RETURNED
from perfagent.hooks.alike import read_alike, runs
from perfagent.hooks.progress import Progress
from perfagent.hooks.reading import Note, StepReader
from perfagent.rootcause.investigator import Investigator
from perfagent.signals.flops import StepFlops
from perfagent.signals.operators import Counted

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
                trace += [(DATA, self.tick(), self.tick(), loader, size if one.random() < 0.98 else None) for _ in range(fetches)]
            training = habits["training"] or one.random() < 0.5
            trace.append((FORWARD, self.tick(), None, training, None if loader is not None else size))
            if habits["cleared"] == "before":
                trace.append((CLEARED, self.tick(), self.tick()))
            if habits["returned"] is not None:
                trace.append((RETURNED, self.tick(), None, habits["returned"] if one.random() < 0.98 else True))
            if habits["cleared"] == "after":
                trace.append((CLEARED, self.tick(), self.tick()))
            if habits["phase"]:
                trace.append((PHASE, self.tick(), self.tick(), "checkpoint"))
            loss = one.choice([one.random()] * 60 + [math.nan, math.inf, None, 3])
            trace.append((BACKWARD, self.tick(), None, loss, one.random() < 0.2))
            trace.append((BACKWARD_END, self.tick() if one.random() < 0.98 else self.now, None))
        trace.append((OPTIMIZER, self.tick(), None))
        trace.append((OPTIMIZER_END, self.tick() if one.random() < 0.98 else self.now, None))
        self.step += 1
        rare = one.choice([{"grad/norm": 1.0}, {"grad/norm": 2.0, "grad/nonfinite": one.choice([0.0, 0.0, 1.0])}, None, None])
        rare = rare if one.random() < 0.2 else None
        user_loss = None
        if one.random() < habits["logs"]:
            user_loss = loss if habits["honest"] and type(loss) is float else one.random()
        wall = 1000.0 + self.step if habits["wall"] else 0.0
        return Note(self.step, wall, began, habits["micro"], habits["lr"], user_loss, 0, trace, rare)

    def notes(self, count: int) -> list[Note]:
        found = []
        for _ in range(count):
            if self.random.random() < 0.03:
                self.change()
            found.append(self.note())
        return found


class Silent:
    def __init__(self) -> None:
        self.rows: deque = deque()


def reader(*, embedded: bool) -> StepReader:
    made = StepReader()
    made.epoch = 1_000_000.0
    made.account.embedded = embedded
    made.flops = StepFlops(lambda: None)
    made.flops._known[32, 0] = Counted(products=1e9, attention=0.0)
    made.investigator = Investigator(Progress(deque(), None), Silent(), lambda: None)
    return made


def table(groups) -> dict[str, list[tuple[int, float, float, str]]]:
    found: dict[str, list[tuple[int, float, float, str]]] = {}
    for group in groups:
        steps, times, monotonics = array("q", group.step), array("d", group.time), array("d", group.monotonic)
        for name in group.values:
            found.setdefault(name, []).extend(zip(steps, times, monotonics, map(repr, group.column(name)), strict=True))
    return {name: sorted(rows) for name, rows in found.items()}


@pytest.mark.parametrize("seed", range(24))
def test_whatever_the_loop_does_both_ways_of_reading_agree(seed):
    notes = Loop(seed).notes(320)
    alone, together = reader(embedded=seed % 2 == 0), reader(embedded=seed % 2 == 0)
    failed: list[object] = []
    one, other = [], []
    for begin in range(0, len(notes), 80):
        part = notes[begin : begin + 80]
        one += groups_of(rows_of(part, alone, failed.append), Columns(), failed.append)
        other += read([Draft([], part)], together, Columns(), failed.append)
    assert table(other) == table(one)
    assert not failed
    assert together.investigator.history() == alone.investigator.history()
    for loader in LOADERS:
        assert together.account.has_waiting(loader) == alone.account.has_waiting(loader)
    assert (together.account.feeding, together.account._loader) == (alone.account.feeding, alone.account._loader)
    for name in ("_watchful", "_inquiries", "_bad_step"):
        assert getattr(together.investigator, name) == getattr(alone.investigator, name)
    assert together.loss_by_user == alone.loss_by_user
    assert together.flops._newest == alone.flops._newest


def test_the_usual_loop_is_read_at_once():
    """What most loops do: a batch, a call, clearing, backward, the optimizer."""
    loop = Loop(1)
    loop.habits |= {"data": 7, "ahead": False, "returned": False, "cleared": "after", "size": (32, None, False), "lr": 0.1}
    loop.habits |= {"micro": 1, "phase": False, "training": True, "wall": False, "logs": 0.0}
    sound = [
        note for note in [loop.note() for _ in range(100)][1:]
        if note.rare is None or not note.rare.get("grad/nonfinite")
        if type(note.trace[4][3]) is float and math.isfinite(note.trace[4][3]) and note.trace[0][4] and len(note.trace) == 8
        and note.trace[2][3] is False and note.trace[4][1] < note.trace[5][1] and note.trace[6][1] < note.trace[7][1]
    ]  # fmt: skip
    ((plan, run),) = runs(sound)
    assert plan is not None
    assert len(run) == len(sound) > 60
    found = read_alike(reader(embedded=False), plan, run)
    assert found is not None
    block, rows = found
    assert [*block.steps] == [note.step for note in sound if note.rare is None]
    assert [row[0] for row in rows] == [note.step for note in sound if note.rare is not None]
    assert len(rows) > 3
    assert block.names[-5:] == ("phase/data_s", "phase/forward_s", "phase/backward_s", "phase/optimizer_s", "phase/other_s")
