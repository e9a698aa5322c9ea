"""Values that no healthy sender sends, and that logs and drivers send all the same: no rule may fail on them."""

from __future__ import annotations

import random

from judging import make_evaluator

from perfagent.wire import Group
from perfagent_server.store.codec.tail import TailGroup
from perfagent_server.store.stored import FromTail


def test_steps_that_took_no_time_are_left_out() -> None:
    """A log whose clock is coarse: two of three steps have the time of the one before."""
    evaluator, draw, now = make_evaluator(), random.Random(0), 1_700_000_000.0
    evaluator.start_clock(now)
    for step in range(1, 601):
        now += 0.3
        took = draw.choice((0.0, 0.0, 0.9))
        columns = {"loss": [3.0], "step_time_s": [took], "phase/h2d_s": [took / 3], "sync/calls_per_step": [9.0],
                   "sync/reading_s": [0.02], "phase/forward_s": [took / 3]}  # fmt: skip
        readings = {"process/page_faults_per_step": [5000.0]}
        groups = [Group([step], [now], [now], columns), Group([step], [now], [now], readings)]
        evaluator.take(FromTail(step, "r", 1, 0, "s", step, now, [TailGroup.of_group(one) for one in groups], []))
        evaluator.tick(now)
