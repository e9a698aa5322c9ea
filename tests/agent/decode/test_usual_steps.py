"""A usual step is read in a shorter way, which says to the last bit what the other says, and learns the same."""

from __future__ import annotations

import math
import random
from collections import deque

import pytest
from progress import new_progress

from perfagent.causes.investigator import Investigator
from perfagent.decode import step_decoder
from perfagent.decode.phase_times import LoopFacts
from perfagent.decode.step_decoder import StepReader
from perfagent.delivery.drafts import rows_of
from perfagent.measure.batches.size import inputs
from perfagent.measure.flops.op_formulas import Counted
from perfagent.measure.flops.step_flops import StepFlops
from perfagent.step import trace as kinds
from perfagent.step.row import Note
from perfagent.step.trace import entries_of, trace_of

LOADERS = (7, 8)
OF_A_STEP = {"_entries", "_fetches", "_passes", "_repeated", "_again", "_whole", "_evaluated"}


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
                    (kinds.DATA, self.tick(), self.tick(), loader, size if one.random() < 0.98 else None)
                    for _ in range(fetches)
                ]
            training = habits["training"] or one.random() < 0.5
            trace.append((kinds.FORWARD, self.tick(), None, training, None if loader is not None else size))
            if habits["cleared"] == "before":
                trace.append((kinds.CLEARED, self.tick(), self.tick()))
            if habits["returned"] is not None:
                trace.append((kinds.RETURNED, self.tick(), None, habits["returned"] if one.random() < 0.98 else True))
            if habits["cleared"] == "after":
                trace.append((kinds.CLEARED, self.tick(), self.tick()))
            if habits["phase"]:
                trace.append((kinds.PHASE, self.tick(), self.tick(), "checkpoint", None, None))
            loss = one.choice([one.random()] * 60 + [math.nan, math.inf, None, 3])
            trace.append((kinds.BACKWARD, self.tick(), None, loss, one.random() < 0.2))
            trace.append((kinds.BACKWARD_END, self.tick() if one.random() < 0.98 else self.now, None))
        trace.append((kinds.OPTIMIZER, self.tick(), None))
        trace.append((kinds.OPTIMIZER_END, self.tick() if one.random() < 0.98 else self.now, None))
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


class Silent:
    def __init__(self) -> None:
        self.rows: deque = deque()


def reader(*, embedded: bool = False) -> StepReader:
    inputs.changes.clear()  # what other tests fetched
    inputs.changes.append((0, ()))
    made = StepReader()
    made.epoch = 1_000_000.0
    made.facts.embedded = embedded
    made.flops = StepFlops(lambda: None, {(32, 0): Counted(products=1e9, attention=0.0)})
    made.investigator = Investigator(new_progress(deque()), Silent(), lambda: None)
    return made


class Alone(LoopFacts):
    """Reads every step entry by entry."""

    def read_usual(self, trace):
        return None


def learned(made: StepReader) -> list[object]:
    """What a reader has taken from the steps so far for those to come."""
    batches, investigator = vars(made.facts.batches), made.investigator
    found: list[object] = [(name, batches[name]) for name in sorted({*batches} - OF_A_STEP)]
    return [repr(found), made.loss_by_user, repr(investigator.history()), investigator.judged_upto, investigator.is_bad]


@pytest.mark.parametrize("seed", range(6))
def test_whatever_the_loop_does_both_ways_of_reading_agree(seed, monkeypatch):
    ways, lost = [], []
    for facts in (Alone, LoopFacts):
        monkeypatch.setattr(step_decoder, "LoopFacts", facts)
        made = reader(embedded=seed % 2 == 0)
        notes = Loop(seed).notes(320)
        ways.append([(repr(rows_of([note], made, lost.append)), learned(made)) for note in notes])
    assert not lost
    for one, other in zip(*ways, strict=True):
        assert one == other


@pytest.mark.parametrize("loader", [None, 7])
def test_usual_step_is_read_in_the_shorter_way(loader):
    facts, loop = LoopFacts(), Loop(0)
    loop.habits |= {"data": loader, "ahead": False, "micro": 1, "phase": False, "training": True}
    loop.habits["size"] = (32, None, False)
    short = 0
    for _ in range(100):
        trace = loop.note().trace
        if facts.read_usual(trace) is None:
            facts.read(entries_of(trace))
        else:
            short += 1
    assert short > 60
