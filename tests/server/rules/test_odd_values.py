"""Values that no healthy sender sends, and that logs and drivers send all the same: no rule may fail on them."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from judging import START, fired, frame, judge_series, make_evaluator, restored, state

from perfagent_server.rules.catalogue import all_rules
from perfagent_server.rules.model.grad_norm_explosion import GradNormExplosion
from perfagent_server.rules.rule import Series

_KINDS = (
    (math.nan,), (math.inf,), (0.0,), (-1.0, -0.5), (3e17, 8e17), (0.1, 0.5, 0.9), (0.1, 0.5, 0.9),
    (0.0, math.nan, math.inf, -1.0, 1.0, 50.0, 1e-12, 1e12),
)  # fmt: skip


def test_norms_are_not_judged_by_a_loss_scale_that_overflowed() -> None:
    norms, scales = [1.0] * 200 + [100.0] * 8, [2.0] * 201 + [math.inf] * 2 + [2.0] * 5
    changes, _ = judge_series({"grad/norm": norms, "amp/scale": scales}, rules=(GradNormExplosion(),))
    assert len(fired(changes)) == 1


@pytest.mark.parametrize("seed", range(8))
def test_no_rule_fails_on_any_values(seed: int) -> None:
    """All that rules read, of several ranks that send now and then, over restarts of the run and of the server."""
    draw = random.Random(seed)
    evaluator, now = make_evaluator(), START
    evaluator.start_clock(now)
    names = sorted({one.name for rule in all_rules() for one in rule.reads if isinstance(one, Series)})
    share, rows = draw.choice((0.3, 0.7, 1.0)), draw.choice((1, 7, 200))
    chosen = [name for name in names if draw.random() < share or name in ("loss", "step_time_s")]
    kinds = {name: draw.choice(_KINDS) for name in chosen}
    world, step_s, first, attempt = draw.choice((1, 2, 4)), draw.choice((0.002, 0.1, 5.0)), draw.choice((1, 1000)), 1
    with np.errstate(all="ignore"):
        for number in range(3 if rows == 200 else 16):
            now += max(1.0, rows * step_s)
            steps = range(first, first + rows)
            for rank in range(world):
                columns = {
                    of: [draw.choice(kinds[name]) for _ in steps]
                    for name in chosen
                    for of in ([f"{name}{layer}" for layer in range(3)] if name.endswith("/") else [name])
                }
                begun = [] if number else [state("running", world_size=world, start_step=first - 1)]
                told = {"ident": evaluator.upto + 1, "rank": rank, "attempt": attempt, "received": now, "events": begun}
                evaluator.take(frame(columns, steps, **told))  # type: ignore[arg-type]
            evaluator.tick(now + 0.5)
            evaluator.verdict()
            first += rows
            if draw.random() < 0.15:
                attempt += 1
            if draw.random() < 0.15:
                evaluator = restored(evaluator)
                evaluator.start_clock(now)


@pytest.mark.parametrize(("name", "value"), [("process/rss_bytes", math.nan), ("gpu/sm_clock_mhz", -1.0)])
def test_a_sampler_that_only_fails_has_told_nothing(name: str, value: float) -> None:
    read = {one.name for rule in all_rules() for one in rule.reads if isinstance(one, Series) and one.axis == "time"}
    evaluator = make_evaluator()
    evaluator.start_clock(START)
    for second in range(1, 121):
        readings = {other: [value if other == name else 50.0] for other in read}
        evaluator.take(frame({"step_time_s": [1.0]} | readings, [second], ident=second, step_s=1.0))
        evaluator.tick(START + second)
