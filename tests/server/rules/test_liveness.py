"""How a run ended, and whether it is heard; and the verdict that follows."""

from __future__ import annotations

import math

import pytest
from judging import fired, frame, judge_series, state

from perfagent.wire import Event
from perfagent_server.diagnosis.verdict import findings, verdict
from perfagent_server.rules.evaluator import Evaluator

TRACE = "Traceback (most recent call last):\n  File 'train.py', line 3, in <module>\nValueError: bad shape"


def _trained(steps: int = 30, **columns: list[float]) -> Evaluator:
    _, evaluator = judge_series({"loss": [3.0 - 0.01 * step for step in range(steps)], "step_time_s": [0.1] * steps, **columns})
    return evaluator


def _end(evaluator: Evaluator, name: str, *, rank: int = 0, **data: str) -> list:
    return evaluator.take(frame({}, [], ident=evaluator.upto + 1, rank=rank, events=[state(name, step=30, **data)]))


def test_an_exception_is_a_crash_with_the_last_lines_of_its_traceback() -> None:
    evaluator = _trained()
    [change] = _end(evaluator, "failed", reason="ValueError: bad shape", exception="ValueError", traceback=TRACE)
    assert (change.kind, change.finding.rule, change.finding.severity) == ("fire", "process_crash", "critical")
    assert "ValueError: bad shape" in change.finding.message
    assert change.finding.evidence["traceback"].endswith("ValueError: bad shape")
    assert verdict(evaluator).rule == "process_crash"


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("failed", {"reason": "ValueError: bad shape", "exception": "ValueError", "traceback": TRACE}, "exception below"),
        ("failed", {"reason": "exit code 3"}, "The script ended itself"),
        ("failed", {"reason": "SystemExit: 3", "exception": "SystemExit", "traceback": TRACE}, "The script ended itself"),
        ("failed", {"reason": "the disk is full"}, "Look at what the script printed last"),
        ("killed", {"reason": "killed by SIGKILL"}, "look for who sent the signal"),
        ("killed", {"reason": "signal 9"}, "look for who sent the signal"),
        ("killed", {"reason": "killed by SIGSEGV"}, "crashed outside of Python"),
    ],
)  # fmt: skip
def test_what_to_do_follows_from_what_is_known_of_the_end(name: str, data: dict[str, str], says: str) -> None:
    [change] = _end(_trained(), name, **data)
    assert says in change.finding.fix
    assert "last checkpoint" in change.finding.fix
    assert "exception below" not in change.finding.fix or "exception" in data


@pytest.mark.parametrize(
    ("name", "data", "rule", "severity"),
    [
        ("killed", {"reason": "signal 9"}, "process_crash", "critical"),
        ("preempted", {"reason": "SIGTERM"}, "process_crash", "info"),
        ("failed", {"reason": "KeyboardInterrupt", "exception": "KeyboardInterrupt"}, "process_crash", "info"),
        ("oom", {"reason": "the control group's limit"}, "oom_observed", "critical"),
        ("failed", {"reason": "CUDA out of memory.", "exception": "OutOfMemoryError"}, "oom_observed", "critical"),
        ("failed", {"reason": "RuntimeError: DefaultCPUAllocator: can't allocate memory"}, "oom_observed", "critical"),
    ],
)  # fmt: skip
def test_every_end_has_its_rule(name: str, data: dict[str, str], rule: str, severity: str) -> None:
    evaluator = _trained()
    changes = _end(evaluator, name, **data)
    assert [(change.finding.rule, change.finding.severity) for change in fired(changes)] == [(rule, severity)]


def test_a_finished_run_raises_nothing_and_is_healthy_with_figures() -> None:
    evaluator = _trained()
    assert _end(evaluator, "finished") == []
    found = verdict(evaluator)
    assert found.rule == "healthy"
    assert "step 30" in found.message
    assert "2.71" in found.message
    assert "100 ms a step" in found.message


def test_the_first_failure_leads_and_the_other_ranks_are_its_consequence() -> None:
    evaluator = _trained()
    evaluator.window.world_size = 3
    changes = _end(evaluator, "failed", rank=1, reason="ValueError: bad shape")
    for rank in (0, 2):
        changes += _end(evaluator, "preempted", rank=rank, reason="SIGTERM")
    assert len(fired(changes)) == 1
    assert "Rank 1 failed" in fired(changes)[0].finding.message


def test_out_of_memory_on_one_rank_and_a_crash_on_another_are_one_alert() -> None:
    evaluator = _trained()
    evaluator.window.world_size = 2
    changes = _end(evaluator, "failed", rank=0, reason="RuntimeError: NCCL error")
    changes += _end(evaluator, "oom", rank=1, reason="the control group's limit")
    assert len(fired(changes)) == 1
    assert len({change.alert for change in changes}) == 1
    assert changes[-1].finding.rule == "oom_observed"


def test_the_watchers_word_does_not_repeat_what_the_trainer_said() -> None:
    evaluator = _trained()
    changes = _end(evaluator, "failed", reason="KeyboardInterrupt", exception="KeyboardInterrupt")
    changes += _end(evaluator, "failed", reason="exit code 130")
    assert [change.finding.severity for change in fired(changes)] == ["info"]


def test_a_finished_run_that_waited_for_data_all_the_time_still_says_so() -> None:
    evaluator = _trained(60, **{"phase/data_s": [0.08] * 60})
    changes = _end(evaluator, "finished")
    assert [(change.kind, change.finding.rule) for change in changes] == [("resolve", "data_bound")]
    assert verdict(evaluator).rule == "data_bound"


def test_a_nan_stays_open_when_the_run_ends_with_it() -> None:
    evaluator = _trained(30, loss=[3.0] * 20 + [math.nan] * 10)
    assert _end(evaluator, "finished") == []
    assert verdict(evaluator).rule == "nonfinite_loss"


def test_sick_comes_before_slow_and_dead_before_sick() -> None:
    evaluator = _trained(60, loss=[3.0] * 50 + [math.nan] * 10, **{"phase/data_s": [0.08] * 60})
    assert verdict(evaluator).rule == "nonfinite_loss"
    assert [found.rule for found in findings(evaluator)] == ["nonfinite_loss", "data_bound"]
    _end(evaluator, "oom", reason="limit")
    assert verdict(evaluator).rule == "oom_observed"


def test_silence_is_told_once_and_taken_back_when_frames_come_again() -> None:
    evaluator = _trained()
    now = evaluator.window.now
    changes = evaluator.silence({(1, 0): 31.0}, now + 31)
    changes += evaluator.silence({(1, 0): 40.0}, now + 40)
    assert [(change.kind, change.finding.rule) for change in changes] == [("fire", "lost_contact")]
    assert "31 s" in changes[0].finding.message
    [back] = evaluator.take(frame({"loss": [1.0]}, [31], ident=evaluator.upto + 1))
    assert (back.kind, back.alert) == ("resolve", changes[0].alert)


@pytest.mark.parametrize(
    ("world", "silent", "who"),
    [(1, [0], "The training process"), (4, [2], "Rank 2"), (4, [0, 3], "2 of 4 ranks")],
    ids=["one process", "one rank", "ranks"],
)
def test_silence_names_who_fell_silent_and_stays_true_with_time(world: int, silent: list[int], who: str) -> None:
    evaluator = _trained()
    evaluator.window.world_size = world
    [change] = evaluator.silence({(1, rank): 31.0 for rank in silent}, evaluator.window.now + 31)
    assert change.finding.message == f"{who} went silent after step 30: nothing was heard for 31 s."


def test_a_healthy_verdict_is_in_the_tense_of_its_run_and_claims_nothing_before_anything_came() -> None:
    assert verdict(Evaluator("r")).message == "Nothing to judge yet: no loss, step time or gradient norm has come."
    evaluator = _trained()
    assert verdict(evaluator).message == "Nothing holds this run back: step 30, loss 2.71 (from 3), 100 ms a step."
    _end(evaluator, "finished")
    assert verdict(evaluator).message == "Nothing held this run back: step 30, loss 2.71 (from 3), 100 ms a step."


def test_silence_of_an_older_attempt_or_after_the_end_says_nothing() -> None:
    evaluator = _trained()
    assert evaluator.silence({(0, 0): 100.0}, evaluator.window.now + 100) == []
    _end(evaluator, "finished")
    assert evaluator.silence({(1, 0): 100.0}, evaluator.window.now + 100) == []


def test_what_the_agent_found_is_an_alert_under_its_own_rule() -> None:
    evaluator = _trained()
    told = {
        "rule": "oom_observed",
        "severity": "critical",
        "message": "CUDA out of memory in step 7",
        "since_step": 7,
        "fix": "less",
    }
    event = Event(kind="finding", time=1.0, step=7, data=told)
    changes = evaluator.take(frame({}, [], ident=evaluator.upto + 1, events=[event]))
    changes += _end(evaluator, "oom", reason="OutOfMemoryError")
    assert [(change.finding.rule, change.finding.since_step) for change in fired(changes)] == [("oom_observed", 7)]


def test_a_users_alert_is_told_at_once_and_not_again_within_a_minute() -> None:
    evaluator = _trained()

    def say(title: str, at: float, level: str = "WARN") -> list:
        event = Event(kind="alert", time=at, data={"title": title, "text": "look", "level": level})
        return evaluator.take(frame({}, [], ident=evaluator.upto + 1, received=at, events=[event]))

    now = evaluator.window.now
    first = say("accuracy fell", now)
    assert [(change.kind, change.finding.severity) for change in first] == [("fire", "warning")]
    assert say("accuracy fell", now + 10) == []
    assert [change.finding.severity for change in fired(say("disk", now + 11, "ERROR"))] == ["critical"]
    again = say("accuracy fell", now + 100)
    assert [change.kind for change in again] == ["fire"]
    assert again[0].alert != first[0].alert
    assert verdict(evaluator).rule == "healthy"
