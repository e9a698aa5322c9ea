"""A usual step is read in a shorter way, which says to the last bit what the other says, and learns the same."""

from __future__ import annotations

import math
import random
from collections import deque
from types import SimpleNamespace

import pytest
from progress import new_progress

from perfagent.causes.investigator import Investigator
from perfagent.decode import step_decoder
from perfagent.decode.phase_times import TraceReader
from perfagent.decode.step_decoder import StepReader
from perfagent.measure.batches.size import inputs
from perfagent.probes.flops.op_formulas import Counted
from perfagent.probes.flops.step_flops import StepFlops
from perfagent.step import trace as kinds
from perfagent.step.row import StepRow
from perfagent.step.trace import entries_of, trace_of

OF_A_STEP = {"_entries", "_fetches", "_passes", "_repeated", "_again", "_whole", "_evaluated"}
CHOICES = {
    "loader": (None, 7, 7, 8), "fetches": (1,) * 9 + (2,), "returned": (None, True, False), "cleared": (None, "before", "after"),
    "size": ((32, None, False), (16, 256, True), (16, 256, False), (None, None, False)), "lr": (0.1, 0.1, None),
    "micro": (1, 1, 1, 2), "phase": (False,) * 9 + (True,), "training": (True,) * 19 + (False,),
    "logs": (0.02, 0.0, 0.98, 1.0), "honest": (True,) * 4 + (False,),
}  # fmt: skip
"""What a training may do in each of its steps."""


class Loop:
    """Makes the steps of a training that keeps its habits for a while and then changes them."""

    def __init__(self, seed: int, **habits: object) -> None:
        self.random = random.Random(seed)
        self.now, self.step = 10**9, 0
        self.given, self.habits = habits, SimpleNamespace()
        self.change()

    def change(self) -> None:
        self.habits = SimpleNamespace(**{name: self.random.choice(of) for name, of in CHOICES.items()} | self.given)

    def is_odd(self) -> bool:
        """Once in fifty times."""
        return self.random.random() >= 0.98

    def tick(self) -> int:
        self.now += self.random.randrange(1, 3_000_000)
        return self.now

    def step_row(self) -> tuple[StepRow, dict[str, float] | None, float | None]:
        """A step, what only some have, and the loss that the script logs."""
        does, began, trace = self.habits, self.now if self.step else 0, []
        is_fed = does.loader is not None
        for _ in range(does.micro):
            trace += [
                (kinds.DATA, self.tick(), self.tick(), does.loader, None if self.is_odd() else does.size)
                for _ in range(does.fetches if is_fed else 0)
            ]
            training = does.training or self.random.random() < 0.5
            trace.append((kinds.FORWARD, self.tick(), None, training, None if is_fed else does.size))
            if does.cleared == "before":
                trace.append((kinds.CLEARED, self.tick(), self.tick()))
            if does.returned is not None:
                trace.append((kinds.RETURNED, self.tick(), None, does.returned or self.is_odd()))
            if does.cleared == "after":
                trace.append((kinds.CLEARED, self.tick(), self.tick()))
            if does.phase:
                trace.append((kinds.PHASE, self.tick(), self.tick(), "checkpoint", None, None))
            loss = self.random.choice([self.random.random()] * 60 + [math.nan, math.inf, None, 3])
            trace.append((kinds.BACKWARD, self.tick(), None, loss, self.random.random() < 0.2))
            trace.append((kinds.BACKWARD_END, self.now if self.is_odd() else self.tick(), None))
        trace.append((kinds.OPTIMIZER, self.tick(), None))
        trace.append((kinds.OPTIMIZER_END, self.now if self.is_odd() else self.tick(), None))
        self.step += 1
        rare = self.random.choice([{"grad/norm": 1.0}, {"grad/norm": 2.0, "grad/nonfinite": 1.0}, *[None] * 8])
        logged = loss if does.honest and type(loss) is float else self.random.random()
        user_loss = logged if self.random.random() < does.logs else None
        return StepRow(self.step, began, does.micro, does.lr, trace_of(trace), None), rare, user_loss


def reader(*, embedded: bool) -> StepReader:
    inputs.changes.clear()  # what other tests fetched
    inputs.changes.append((0, ()))
    made = StepReader()
    made.epoch = 1_000_000.0
    made.facts.embedded = embedded
    made.add_flops = StepFlops(lambda: None, {(32, 0): Counted(products=1e9, attention=0.0)}).add
    made.investigator = Investigator(new_progress(deque()), SimpleNamespace(rows=deque()), lambda: None)
    return made


class Alone(TraceReader):
    """Reads every step entry by entry."""

    def read_usual(self, trace):
        return None


def learned(made: StepReader) -> list[object]:
    """What a reader has taken from the steps so far for those to come."""
    batches, investigator = vars(made.traces.batches), made.investigator
    found: list[object] = [(name, batches[name]) for name in sorted({*batches} - OF_A_STEP)]
    return [repr(found), made.loss_by_user, repr(investigator.history()), investigator.judged_upto, investigator.is_bad]


@pytest.mark.parametrize("seed", range(6))
def test_whatever_the_loop_does_both_ways_of_reading_agree(seed, monkeypatch):
    ways = []
    for facts in (Alone, TraceReader):
        monkeypatch.setattr(step_decoder, "TraceReader", facts)
        made, loop, said = reader(embedded=seed % 2 == 0), Loop(seed), []
        for _ in range(320):
            if loop.random.random() < 0.03:
                loop.change()
            row, rare, user_loss = loop.step_row()
            said.append((repr(made.row(row, rare, user_loss=user_loss)), learned(made)))
        ways.append(said)
    for one, other in zip(*ways, strict=True):
        assert one == other


@pytest.mark.parametrize("loader", [None, 7])
def test_usual_step_is_read_in_the_shorter_way(loader):
    facts, short = TraceReader(), 0
    loop = Loop(0, loader=loader, fetches=1, micro=1, phase=False, training=True, size=(32, None, False))
    for _ in range(100):
        trace = loop.step_row()[0].trace
        if facts.read_usual(trace) is None:
            facts.read(entries_of(trace))
        else:
            short += 1
    assert short > 60
