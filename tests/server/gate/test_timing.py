"""What the gate makes of blocks and steps whose difference is known."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfagent_server.gate.judgment import CANNOT_TELL, FINE, WORSE, judge
from perfagent_server.gate.timing import TIMES, Difference, Steps, apart, culprit, grown, paired
from perfagent_server.gate.turns import Block

BLOCK_S = 0.5
Side = tuple[list[Block], Steps]


def in_turn(
    base_s: float, new_s: float, *, pairs: int = 40, noise: float = 0.0, drift: float = 1.0, seed: int = 1
) -> list[Side]:
    """Two commands with these seconds a step, as they would have run. noise: of the length of a step; drift: the factor by which
    the machine is slower at the end."""
    random, now = np.random.default_rng(seed), 1e9
    blocks: list[list[Block]] = [[], []]
    ends: list[list[float]] = [[], []]
    seconds: list[list[float]] = [[], []]
    left, began = [0.0, 0.0], [now, now]
    for pair in range(pairs):
        for side in (0, 1) if pair % 2 == 0 else (1, 0):
            at, until = now, now + BLOCK_S
            while True:
                if left[side] <= 0:
                    slower = 1 + (drift - 1) * pair / pairs
                    left[side] = (base_s, new_s)[side] * slower * math.exp(random.normal(0, noise))
                    began[side] = at
                if at + left[side] > until:
                    left[side] -= until - at
                    break
                at += left[side]
                left[side] = 0.0
                ends[side].append(at)
                seconds[side].append(at - began[side])
            blocks[side].append(Block(now, until, 0.9 * BLOCK_S, 0.0))
            now = until
    return [(blocks[side], Steps(np.array(ends[side]), np.array(seconds[side]))) for side in (0, 1)]


def differences(base: Side, new: Side) -> dict[str, Difference]:
    return {one.what: one for one in paired(base, new, min(len(base[0]), len(new[0])), 0.99)}


@pytest.mark.parametrize(("step_s", "noise"), [(0.013, 0.05), (0.21, 0.02), (0.9, 0.0)])
def test_ratio_of_seconds_a_step_is_found(step_s: float, noise: float) -> None:
    found = differences(*in_turn(step_s, 1.05 * step_s, noise=noise, pairs=80))
    for what in TIMES:
        assert found[what].value == pytest.approx(1.05, abs=0.01), what
        assert found[what].low - 1e-3 <= 1.05 <= found[what].high + 1e-3


def test_machine_that_grows_slower_makes_no_difference() -> None:
    found = differences(*in_turn(0.02, 0.02, drift=2.0))
    assert found["wall"].value == pytest.approx(1.0, abs=0.004)


def test_pairs_without_a_difference_are_seldom_told_apart() -> None:
    codes = [
        judge(paired(*in_turn(0.03, 0.03, noise=0.3, seed=seed), 40, 0.99), [], 0.03).exit_code for seed in range(60)
    ]
    assert codes.count(WORSE) <= 1, "half a percent is promised, of any run of seeds"


def test_few_rounds_are_no_answer() -> None:
    judgment = judge(paired(*in_turn(0.02, 0.03, pairs=18), 18, 0.99), [], 0.03)
    assert judgment.exit_code == CANNOT_TELL
    assert "at least 10 are needed" in judgment.why


@settings(deadline=None, max_examples=40)
@given(share=st.floats(0, 1), step_s=st.floats(0.01, 3.0))
def test_run_that_ends_early_gives_no_wrong_number(share: float, step_s: float) -> None:
    (base_blocks, base), (new_blocks, new) = in_turn(step_s, step_s, pairs=30)
    at = int(share * len(new.ends))
    cut = Steps(new.ends[:at], new.seconds[:at])
    for one in differences((base_blocks, base), (new_blocks, cut)).values():
        assert one.value is None or one.value == pytest.approx(1.0, abs=0.2)


def difference(what: str, value: float, half: float) -> Difference:
    return Difference(what, value, value - half, value + half, 40)


@pytest.mark.parametrize(
    ("wall", "unqueued", "cpu", "code", "by"),
    [
        ((1.05, 0.01), (1.05, 0.01), (1.05, 0.01), WORSE, "wall"),
        ((1.00, 0.02), (1.05, 0.01), (1.05, 0.01), FINE, "wall"),
        ((1.04, 0.09), (1.05, 0.02), (1.0, 0.01), WORSE, "unqueued"),
        ((1.04, 0.09), (1.00, 0.02), (1.0, 0.01), FINE, "unqueued"),
        ((1.04, 0.09), (1.02, 0.05), (1.05, 0.02), WORSE, "cpu"),
        ((1.04, 0.09), (1.02, 0.05), (1.0, 0.01), CANNOT_TELL, "wall"),
        ((1.50, 0.40), (1.02, 0.05), (1.0, 0.01), WORSE, "wall"),
    ],
)
def test_noisy_wall_time_leaves_the_word_to_the_others(
    wall: tuple[float, float], unqueued: tuple[float, float], cpu: tuple[float, float], code: int, by: str
) -> None:
    judgment = judge([difference(what, *one) for what, one in zip(TIMES, (wall, unqueued, cpu), strict=True)], [], 0.03)
    assert (judgment.exit_code, judgment.by) == (code, by)


def test_stored_runs_are_compared_by_median_and_mean() -> None:
    random = np.random.default_rng(4)

    def steps(seconds: np.ndarray, waits: float) -> Steps:
        phases = {"data": np.full(len(seconds), waits), "forward": seconds - waits}
        return Steps(np.cumsum(seconds), seconds, phases)

    base = 0.1 * np.exp(random.normal(0, 0.02, 600))
    pauses = np.where(np.arange(600) % 10 == 0, 0.1, 0.0)  # the mean grows, the median does not
    [found] = apart(steps(base, 0.01), steps(base + pauses, 0.01), 0.99)
    assert found.value == pytest.approx(1.1, abs=0.01) and found.low > 1
    [same] = apart(steps(base, 0.01), steps(base[::-1], 0.01), 0.99)
    assert judge([same], [], 0.03).exit_code == FINE
    parts = grown(steps(base, 0.01), steps(base + 0.03, 0.04))
    assert culprit(parts) == "data" and parts[0].new_s - parts[0].base_s == pytest.approx(0.03)
    [short] = apart(steps(base[:30], 0.01), steps(base, 0.01), 0.99)
    assert judge([short], [], 0.03).exit_code == CANNOT_TELL
