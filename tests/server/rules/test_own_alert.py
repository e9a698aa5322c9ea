"""Alerts that users make themselves: when they fire, and what no form may say."""

from __future__ import annotations

import math
from typing import Any

import pytest
from judging import fired, frame, judge_series, make_evaluator, restored

from perfagent_server.rules.catalogue import all_rules
from perfagent_server.rules.own_alert import MOST_SERIES, FormError, own_alert
from perfagent_server.rules.texts.spoken import spoken

NAN = math.nan
HIGH = {"name": "high", "metric": "reward", "comparison": ">", "threshold": 3, "for_steps": 20}
MEAN, MINUTE = HIGH | {"function": "mean"}, HIGH | {"for_steps": None, "for_s": 60}
STUCK = {"name": "stuck", "metric": "reward", "function": "rise", "for_steps": 50}
RISEN = [*map(float, range(30)), *[29.0] * 49]


@pytest.mark.parametrize("rows", [1, 7, 1000])
@pytest.mark.parametrize(
    ("form", "values", "fires_at"),
    [
        (HIGH, [1.0] * 10 + [4.0] * 20, [30]), (HIGH, [1.0] * 10 + [4.0] * 19 + [1.0] * 30, []),
        (HIGH, [4.0] * 10 + [NAN] + [4.0] * 20, [31]), (HIGH, [math.inf] * 20, [20]),
        (HIGH | {"comparison": ">="}, [3.0] * 20, [20]), (HIGH | {"comparison": "<="}, [3.0] * 20, [20]),
        (HIGH | {"comparison": "<"}, [3.0] * 20, []), (HIGH | {"comparison": "<", "for_steps": 1}, [1.0], [1]),
        (MEAN, [1.0, 9.0] * 20, [20]), (MEAN, [4.0, NAN] * 20, [20]), (MEAN, [NAN] * 50, []),
        (MEAN | {"for_steps": 1000}, [1.0] * 500 + [4.0] * 1200, [1173]),  # 1167 and a piece
        (HIGH | {"function": "min"}, [1.0] + [4.0] * 20, [21]), (HIGH | {"function": "max"}, [1.0] * 30 + [4.0], [31]),
        (STUCK, RISEN, []), (STUCK, [*RISEN, NAN], [80]), (STUCK, [NAN] * 51, [51]),
        (STUCK | {"function": "fall"}, [*map(float, range(60))], [51]),
        (MINUTE, [4.0] * 60, []), (MINUTE, [4.0] * 61, [61]), (MINUTE | {"function": "mean"}, [4.0] * 61, [61]),
        (STUCK | {"for_steps": None, "for_s": 60}, [4.0] * 62, [61]),
    ],
)  # fmt: skip
def test_it_fires_when_it_has_lasted(form: dict[str, Any], values: list[float], fires_at: list[int], rows: int) -> None:
    changes, _ = judge_series({"reward": values}, rules=[own_alert(form)], rows=rows, step_s=1.0)
    steps = [change.step for change in fired(changes)]
    assert len(steps) == len(fires_at)
    if rows == 1 or "for_s" not in form:  # of a frame the last step is the run's
        assert steps == fires_at


def test_a_value_counts_until_the_next_but_no_silence_does() -> None:
    judge, other = (make_evaluator(rules=[own_alert(HIGH)]) for _ in range(2))
    assert not other.take(frame({"reward": [4.0]}, [100]))
    assert [change.kind for change in other.take(frame({"reward": [4.0]}, [200], ident=2))] == ["fire"]
    assert not judge.take(frame({"reward": [4.0] * 15}, range(15)))
    assert not judge.take(frame({"reward": [4.0] * 5}, range(5000, 5005), ident=2))
    assert judge.take(frame({"reward": [4.0] * 15}, range(5005, 5020), ident=3))


def test_it_survives_a_restart_and_is_resolved_after_as_long() -> None:
    judge = make_evaluator(rules=[own_alert(HIGH | {"note": "Ask Ann."})])
    judge.take(frame({"reward": [4.0] * 15}, range(1, 16)))
    judge = restored(judge)
    [fire] = judge.take(frame({"reward": [4.0] * 10}, range(16, 26), ident=2))
    assert (fire.step, fire.finding.rule, fire.finding.since_step) == (20, "own:high", 1)
    [resolved] = restored(judge).take(frame({"reward": [1.0] * 30}, range(26, 56), ident=3))
    assert (resolved.kind, resolved.step) == ("resolve", 45)
    assert spoken(fire.finding, "zh").message == "reward 为 4：自第 1 步起 > 3，已持续 20 步以上。Ask Ann."


def test_a_pattern_watches_twenty_series_and_says_so() -> None:
    series = {f"loss/{at}": [4.0] * 30 for at in range(MOST_SERIES + 5)} | {"other": [4.0] * 30}
    changes, judge = judge_series(series, rules=[own_alert(HIGH | {"metric": "loss/*"})], rows=10)
    assert [change.kind for change in changes] == ["fire"]
    assert "So are 19 more series. Only 20 series that match are watched." in judge.findings()[0].message


def test_ranks_are_put_together_and_rules_read_as_before() -> None:
    judge = make_evaluator(rules=[*all_rules(), own_alert(HIGH | {"metric": "train_loss"})])
    judge.window.world_size = 2
    for ident, rank in enumerate((0, 1), 1):  # the means are 4
        changes = judge.take(frame({"train_loss": [2.0 + 4.0 * rank] * 40}, range(1, 41), rank=rank, ident=ident))
    assert [(change.step, change.finding.evidence["value"]) for change in changes] == [(20, 4.0)]
    bad = judge.take(frame({"train_loss": [NAN]}, [41], rank=0, ident=3))
    assert (judge.window.loss_name, [change.finding.rule for change in fired(bad)]) == (
        "train_loss",
        ["nonfinite_loss"],
    )


def test_what_is_missing_is_told_by_the_clock_until_it_comes() -> None:
    judge = make_evaluator(rules=[own_alert({"name": "gone", "metric": "eval/*", "function": "missing", "for_s": 60})])
    changes = judge.take(frame({"eval/acc": [1.0]}, [1], received=1000.0))
    judge.start_clock(1000.0)
    for now in range(1005, 1101, 5):
        changes += judge.tick(float(now))
    assert [(change.kind, change.time) for change in changes if change.kind != "update"] == [("fire", 1060.0)]
    came = judge.take(frame({"eval/acc": [1.0]}, [100], received=1101.0, ident=2))
    assert [change.kind for change in came] == ["resolve"]


@pytest.mark.parametrize(
    ("field", "change", "says"),
    [
        ("name", {"name": "a b"}, "name is 'a b'; it consists of letters, digits, "),
        ("function", {"function": "median"}, "function is 'median'; allowed are value, mean, min, max, rise, fall, missing"),
        ("comparison", {"comparison": "=="}, "comparison is '=='; allowed are >, >=, <, <="),
        ("threshold", {"threshold": NAN}, "threshold must be a number, not nan"),
        ("comparison", {"function": "rise"}, "rise compares with no number"),
        ("for_steps", {"for_s": 5}, "give either for_steps or for_s"),
        ("threshold", {"threshold": 10**400}, "threshold must be a number, not 1000"),
        ("for_s", {"for_steps": None, "for_s": math.inf}, "for_s must be a number from 1 to 2,592,000 (30 days), not inf"),
        ("expression", {"expression": "a > b"}, "an alert has no 'expression'; it has name, metric, function, "),
    ],
)  # fmt: skip
def test_a_wrong_form_is_refused_with_what_is_allowed(field: str, change: Any, says: str) -> None:
    with pytest.raises(FormError) as refused:
        own_alert(HIGH | change)
    assert (refused.value.field, says in str(refused.value)) == (field, True)
