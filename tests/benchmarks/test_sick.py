"""scripts/sick: its expectations can be read, a record is judged by them, and a first try stays."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from sick.batches import PROGRAMS, Program, all_programs, chosen
from sick.by_rule import OfPrograms, by_rule
from sick.expectations import Expectation, WrongExpectationError, expectation, read
from sick.judging import Judgment, judged
from sick.page import program_tables, section
from sick.results import Kept, keep

SICK = expectation({"accept": {"loss_spike": "batch", "hang": ""}, "also": ["dead_units"], "names": "shuffl"}, "here")
HEALTHY = expectation({"healthy": True}, "here")


def finding(rule: str = "loss_spike", message: str = "in a batch", **more: Any) -> dict[str, Any]:
    return {"rule": rule, "severity": "warning", "message": message, "first_seen": 107.0} | more


WELL = finding("healthy", "all is well", severity="info")


def record(*alerts: dict[str, Any], before: dict[str, Any] = WELL, after: dict[str, Any] = WELL, **more: Any) -> Any:
    return {
        "batch": "b", "program": "p", "cut": False, "wall_s": 20.0, "left_behind": 0, "truths": [{"onset": 100.0}],
        "live": {"state": "running", "step": 9, "verdict": before}, "ended": {"state": "finished", "verdict": after},
        "alerts_live": [], "alerts": [*alerts],
    } | more  # fmt: skip


def faults(*alerts: dict[str, Any], by: Expectation = SICK, **more: Any) -> list[str]:
    return [*judged(record(*alerts, **more), by).faults]


@pytest.mark.parametrize(
    ("said", "wrong"),
    [
        ([finding()], []),
        ([finding(), finding("lr_anomaly")], ["false alarm: lr_anomaly"]),
        ([finding(), finding("lr_anomaly", severity="info")], []),
        ([finding(message="all at once")], ["not found", "no alert of it", "false alarm: loss_spike"]),
        ([], ["not found", "no alert of it"]),
    ],
)
def test_a_sick_program_is_right_with_an_accepted_alert(said: list[dict[str, Any]], wrong: list[str]) -> None:
    assert faults(*said) == wrong


def test_a_verdict_before_or_after_the_end_is_enough() -> None:
    either = expectation({"accept": {"hang": ""}, "alert": "either", "state": ["failed", "finished"]}, "here")
    assert faults(before=finding("hang"), by=either) == faults(after=finding("hang"), by=either) == []
    assert faults(by=either) == ["not found"]
    failed = {"state": "oom", "verdict": finding("hang")}
    assert faults(ended=failed, by=either) == ["state oom, not failed or finished"]


def test_only_what_was_said_before_it_was_ended_counts() -> None:
    """Its end is the doing of the benchmark."""
    said = judged(record(finding("hang"), after=finding("hang"), cut=True), SICK)
    assert (said.state, said.verdict) == ("running", "healthy")
    assert said.faults == ("not found", "no alert of it")
    assert said.notes == ("ended by us after 20 s in step 9",)
    assert faults(cut=True, alerts_live=[finding("hang")]) == []


def test_a_healthy_program_is_right_without_any_alert() -> None:
    assert faults(by=HEALTHY) == []
    assert faults(finding("dead_units", severity="info"), by=HEALTHY) == []
    alarm = judged(record(finding("dead_units")), HEALTHY)
    assert (alarm.faults, alarm.silent) == (("false alarm: dead_units",), False)
    remark = finding("unmeasured_time", severity="info")
    assert faults(before=remark, after=remark, by=HEALTHY) == ["not found"]
    assert faults(live={}, ended={}, by=HEALTHY) == ["no such run", "not found"]


def test_time_to_the_alert_and_its_cause_are_told() -> None:
    told = judged(record(finding(first_seen=112.34), finding(fix="shuffle the data")), SICK)
    assert (told.latency_s, told.cause) == (7.0, "not named")
    assert judged(record(finding(fix="shuffle the data")), SICK).cause == "named"
    assert judged(record(finding(evidence={"reason": "never shuffled"})), SICK).cause == "only in the evidence"


# ---- expectations


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ('accept = { hang = "" }\nlimit = 3', "[p] has the unknown key 'limit'; allowed are healthy, accept, also"),
        ('accept = { hung = "" }', "[p] names the unknown rule 'hung'; there are healthy, oom_observed"),
        ('accept = { hang = "(" }', "[p] has a pattern that cannot be read, '('"),
        ('why = "so"', "[p] needs healthy = true, or accept ="),
    ],
)
def test_a_wrong_expectation_says_what_is_allowed(table: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "expected.toml").write_text(f"[p]\n{table}\n")
    with pytest.raises(WrongExpectationError, match=re.escape(message)):
        read(tmp_path / "expected.toml")


def test_every_program_has_an_expectation_and_a_sentence() -> None:
    programs = all_programs()
    files = {str(file) for file in PROGRAMS.glob("*/*.py")}
    assert {one.words[0] for one in programs if one.batch != "demo"} == files != set()
    assert [one.key for one in programs if not one.about] == []
    assert {one.batch for one in chosen(["nan", "fd_leak"])} == {"demo", "unseen_1"}
    with pytest.raises(ValueError, match="no program and no batch 'nap'; batches are "):
        chosen(["nap"])


# ---- what is kept


def program(name: str, expected: Expectation) -> Program:
    return Program("b", name, (), name, f"{name} | so", expected)


def kept_of(kept: Kept, began: str, run: int, name: str, judgment: Judgment) -> None:
    suite = {"began": began, "commit": f"c{began[-1]}", "busy": False, "run": run}
    keep(kept, record(program=name) | suite, judgment)


def test_a_first_try_stays_beside_the_newest_runs() -> None:
    sick = expectation({"accept": {"loss_spike": ""}, "pair": "well"}, "here")
    well = expectation({"healthy": True, "pair": "sick"}, "here")
    programs = [
        program(name, one) for name, one in zip(("sick", "well", "unmeasured"), (sick, well, HEALTHY), strict=True)
    ]
    right, missed = judged(record(finding()), SICK), judged(record(), SICK)
    silent, alarm = judged(record(), HEALTHY), judged(record(finding()), HEALTHY)
    kept: Kept = {}
    kept_of(kept, "2026-01-01", 1, "sick", missed)
    kept_of(kept, "2026-01-01", 1, "well", alarm)
    for run in (1, 2):
        kept_of(kept, "2026-01-02", run, "sick", right)
        kept_of(kept, "2026-01-02", run, "well", silent)
    kept_of(kept, "2026-01-02", 2, "well", alarm)  # judged again
    kept_of(kept, "2026-01-01", 1, "well", silent)  # an older record again
    text = section(programs, kept) + program_tables(programs, kept)
    assert "| b | first try | 2026-01-01, c1 | 0 of 1 | 1 of 1 | 0 of 1 |" in text
    assert "| all | first try |  | 0 of 1 | 1 of 1 |  |" in text
    assert "| b | newest | 2026-01-02, c2, 2 runs | 1 of 1 | 1 of 1 | 0 of 1 |" in text
    assert (
        "| sick | sick / so | `loss_spike` | no: not found; no alert of it | `healthy` | yes | 7.0 | not named |"
        in text
    )
    assert (
        "| well | well / so | healthy | no: false alarm: loss_spike | `healthy` | 1 of 2 times: false alarm: loss"
        in text
    )
    assert "unmeasured" not in text
    assert by_rule(programs, kept) == {"loss_spike": OfPrograms(healthy=1, should=1, named=1, false=1, healthy_false=1)}
