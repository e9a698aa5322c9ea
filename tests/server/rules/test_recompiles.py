"""recompiles: what torch.compile compiles again and again, counted."""

from __future__ import annotations

from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion
from timed_job import TimedJob

from perfagent_server.rules.catalogue import all_rules
from perfagent_server.rules.speed.compile_reasons import compiled_functions
from perfagent_server.rules.speed.recompiles import Recompiles

STEP = {"forward": 0.04, "backward": 0.05, "other": 0.01}
SIZE = "tensor 'tokens' size mismatch at index 1. expected {}, actual {}"


def told(reason: str, *, limit: int = 0, function: str = "forward") -> dict[str, Any]:
    data = {"function": function, "line": "model.py:9", "reason": reason, "seconds": 2.0, "limit_reached": bool(limit)}
    return data | ({"limit": limit} if limit else {})


def job(*parts: tuple[int, float], ranks: int = 1, rules: Any = None) -> TimedJob:
    """Steps of 0.1 s, and in the last of each part a compilation of so many seconds (0: none)."""
    made = TimedJob(*(rules or (Recompiles(),)), ranks=ranks)
    for number, (steps, seconds) in enumerate(parts):
        made.train(steps - 1, STEP)
        made.train(1, STEP | ({"compile": seconds} if seconds else {}))
        if seconds:
            made.event("compile", told(SIZE.format(number + 3, number + 4)))
    return made


def test_nine_lengths_up_to_the_limit_are_named() -> None:
    made = job((1, 5.0), *[(1, 2.0)] * 7, ranks=2)
    made.event("compile", told(SIZE.format(11, 12), limit=8))
    made.train(20, STEP)
    [found] = made.found("recompiles")
    [function] = found.evidence["functions"]
    assert (found.severity, found.since_step, function["function"], function["times"]) == ("warning", 8, "forward", 9)
    assert function["limit_reached"]
    for number in range(600):  # what other ranks tell does not push it out
        made.event("compile", told(f"x == {number}", function="other"), rank=1)
    made.train(2, STEP)
    assert made.found("recompiles")[0].evidence["functions"][0]["function"] == "forward"
    made.restart_server()
    made.train(300, STEP)
    assert made.kinds == ["fire"]


@pytest.mark.parametrize(
    ("parts", "kinds"),
    [
        ([(160, 0.0), *[(100, 0.54)] * 8], ["fire"]),
        ([(160, 0.0), *[(100, 0.52)] * 8], []),
        ([(60, 0.0), *[(100, 2.0)] * 4, (9000, 0.0)], ["fire", "resolve"]),
        ([(10, 30.0), (10, 20.0), (10, 10.0), (10, 5.0), (1000, 0.0)], []),  # the first ones
        ([(200, 20.0), (2, 20.0), (400, 0.0)], []),  # a first evaluation, a last batch
        ([(200, 0.1), (101, 0.1), (101, 60.0), (100, 0.0)], []),  # a long one counts as the second longest
        ([(50, 5.0), (100, 5.0), (100, 5.0), (300, 0.0)], []),
    ],
)
def test_compiling_for_a_twentieth_of_the_time_is_told(parts: list[tuple[int, float]], kinds: list[str]) -> None:
    made = job(*parts)
    assert made.kinds == kinds
    if kinds == ["fire"]:
        [found] = made.found("recompiles")
        assert found.gain_pct == found.evidence["share_pct"] == pytest.approx(100 * 0.54 / 10.54, abs=0.2)


DIMENSION = {"kind": "lengths of a dimension", "of": "tokens", "dimension": 1}


@pytest.mark.parametrize(
    ("reasons", "kind", "because"),
    [
        ([f"self.scale == {n}" for n in range(1, 9)], "values", [{"kind": "values", "count": 9, "of": "self.scale"}]),
        ([f"len(xs) == {n}" for n in range(1, 9)], "values", [{"kind": "lengths", "count": 9, "of": "xs"}]),
        (["self.name == 'a'", "self.name == 'b'"], "values", [{"kind": "values", "count": 3, "of": "self.name"}]),
        ([SIZE.format(n, n + 1) for n in range(3, 11)], "sizes", [{**DIMENSION, "count": 9}]),
        ([SIZE.format(3, n) for n in range(4, 12)], "sizes", [{**DIMENSION, "count": 9}]),
        (["tensor 'x' dtype mismatch."], "other", [{"kind": "guard", "of": "tensor 'x' dtype mismatch."}]),
        ([""], "other", []),
        (
            ["d['{0}'] == 1", "d['{0}'] == 2", SIZE.format(3, 4)], "values",
            [{"kind": "values", "count": 3, "of": "d['{0}']"}, {**DIMENSION, "count": 2}],
        ),
    ],
)  # fmt: skip
def test_reasons_are_counted_by_what_changed(reasons: list[str], kind: str, because: list[dict[str, Any]]) -> None:
    [one] = compiled_functions([told(reason) for reason in reasons])
    assert (one.kind, list(one.because)) == (kind, because)


def test_functions_are_named_with_their_reasons(words: SnapshotAssertion) -> None:
    made = job((60, 0.0), *[(100, 2.0)] * 4, (30, 0.0))
    made.event("compile", told("d['{0}'] == 2", function="other"))
    made.train(1, STEP)
    [much] = made.found("recompiles")
    made.event("compile", told(SIZE.format(11, 12), limit=8))
    made.train(1, STEP)
    [given_up] = made.found("recompiles")
    assert [(one.title, one.message, one.cost) for one in (much, given_up)] == words


def test_a_run_that_only_compiled_at_its_start_is_healthy() -> None:
    verdict = job((1, 30.0), (1, 20.0), (1, 20.0), (600, 0.0), rules=all_rules()).evaluator.verdict()
    assert verdict.rule == "healthy"
    assert verdict.evidence["wall_time_pct"]["compiling"] == pytest.approx(40, abs=1)
