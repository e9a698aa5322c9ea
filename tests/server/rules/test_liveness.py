"""How a run ended, and whether it is heard; and the verdict that follows."""

from __future__ import annotations

import math

import pytest
from judging import fired, frame, judge_series, make_evaluator, restored, state

from perfagent.wire import Event
from perfagent_server.engine.evaluator import Evaluator

TRACE = "Traceback (most recent call last):\n  File 'train.py', line 3, in <module>\nValueError: bad shape"


def _trained(steps: int = 30, **columns: list[float]) -> Evaluator:
    _, evaluator = judge_series(
        {"loss": [3.0 - 0.01 * step for step in range(steps)], "step_time_s": [0.1] * steps, **columns}
    )
    return evaluator


def _end(evaluator: Evaluator, name: str, *, rank: int = 0, **data: str) -> list:
    return evaluator.take(frame({}, [], ident=evaluator.upto + 1, rank=rank, events=[state(name, step=30, **data)]))


def test_an_exception_is_a_crash_with_the_last_lines_of_its_traceback() -> None:
    evaluator = _trained()
    [change] = _end(evaluator, "failed", reason="ValueError: bad shape", exception="ValueError", traceback=TRACE)
    assert (change.kind, change.finding.rule, change.finding.severity) == ("fire", "process_crash", "critical")
    assert "ValueError: bad shape" in change.finding.message
    assert change.finding.evidence["traceback"].endswith("ValueError: bad shape")
    assert evaluator.verdict().rule == "process_crash"


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("failed", {"reason": "ValueError: bad shape", "exception": "ValueError", "traceback": TRACE}, "Read the exception"),
        ("failed", {"reason": "KeyError: 'conversations'", "exception": "KeyError", "traceback": TRACE}, "compare the fields"),
        ("failed", {"reason": "", "exception": "KeyError: 'conversations'"}, "compare the fields"),
        ("failed", {"reason": "IndexError: index out of range in self", "exception": "IndexError"}, "num_embeddings"),
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
    assert "Read the exception" not in change.finding.fix or "exception" in data


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
    found = evaluator.verdict()
    assert found.rule == "healthy"
    assert "step 30" in found.message
    assert "2.71" in found.message


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
    assert evaluator.verdict().rule == "data_bound"


def test_a_nan_stays_open_when_the_run_ends_with_it() -> None:
    evaluator = _trained(30, loss=[3.0] * 20 + [math.nan] * 10)
    assert _end(evaluator, "finished") == []
    assert evaluator.verdict().rule == "nonfinite_loss"


def test_sick_comes_before_slow_and_dead_before_sick() -> None:
    evaluator = _trained(60, loss=[3.0] * 50 + [math.nan] * 10, **{"phase/data_s": [0.08] * 60})
    assert evaluator.verdict().rule == "nonfinite_loss"
    assert [found.rule for found in evaluator.findings()] == ["nonfinite_loss", "data_bound"]
    _end(evaluator, "oom", reason="limit")
    assert evaluator.verdict().rule == "oom_observed"


def test_silence_is_told_once_and_taken_back_when_frames_come_again() -> None:
    evaluator = _trained()
    now = evaluator.window.now
    changes = evaluator.silence({(1, 0): 31.0}, now + 31)
    changes += evaluator.silence({(1, 0): 40.0}, now + 40)
    assert [(change.kind, change.finding.rule) for change in changes] == [("fire", "lost_contact")]
    assert "31 s" in changes[0].finding.message
    [back] = evaluator.take(frame({"loss": [1.0]}, [31], ident=evaluator.upto + 1))
    assert (back.kind, back.alert) == ("resolve", changes[0].alert)


def test_a_silence_that_was_over_is_not_the_verdict_of_a_run_that_finished() -> None:
    evaluator = _trained()
    evaluator.silence({(1, 0): 31.0}, evaluator.window.now + 31)
    assert evaluator.verdict().rule == "lost_contact"
    evaluator.take(frame({"loss": [1.0], "step_time_s": [0.1]}, [31], ident=evaluator.upto + 1))
    assert evaluator.verdict().rule == "healthy"
    _end(evaluator, "finished")
    assert evaluator.verdict().rule == "healthy"


def test_a_silence_that_goes_on_is_replaced_by_how_the_process_ended() -> None:
    evaluator = _trained()
    evaluator.silence({(1, 0): 31.0}, evaluator.window.now + 31)
    changes = _end(evaluator, "killed", reason="killed by SIGKILL")
    assert [(change.kind, change.finding.rule) for change in changes] == [
        ("resolve", "lost_contact"),
        ("fire", "process_crash"),
    ]
    assert (evaluator.verdict().rule, evaluator.verdict().since_step) == ("process_crash", 30)


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
    assert make_evaluator().verdict().message == "Nothing to judge yet: no loss, step time or gradient norm has come."
    evaluator = _trained()
    assert evaluator.verdict().message == "Nothing holds this run back: step 30, loss 2.71 (from 3)."
    _end(evaluator, "finished")
    assert evaluator.verdict().message == "Nothing held this run back: step 30, loss 2.71 (from 3)."


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
    over, again = say("accuracy fell", now + 100)
    assert (over.kind, over.alert, over.why) == ("resolve", first[0].alert, "said again")
    assert again.kind == "fire"
    assert again.alert != first[0].alert
    assert evaluator.verdict().title in ("accuracy fell", "disk"), "nothing else is open"


def _said(evaluator: Evaluator, title: str, at: float) -> list:
    event = Event(kind="alert", time=at, data={"title": title, "level": "info"})
    return evaluator.take(frame({}, [], ident=evaluator.upto + 1, received=at, events=[event]))


def test_every_alert_of_a_user_is_resolved_in_the_end_whatever_was_said_again() -> None:
    evaluator = _trained()
    changes = [change for at in range(4) for change in _said(evaluator, "x", evaluator.window.now + 200 * at)]
    changes += _end(evaluator, "finished")
    assert [change.kind for change in changes] == ["fire", "resolve"] * 4
    assert [change.alert for change in changes[::2]] == [change.alert for change in changes[1::2]]


def test_any_number_of_alerts_of_a_user_leaves_room_for_those_of_the_rules() -> None:
    evaluator = _trained()
    now = evaluator.window.now
    said = [change for at in range(400) for change in _said(evaluator, f"best loss {at}", now + at)]
    assert (len(fired(said)), evaluator.dropped) == (256, 144)  # in seven minutes: a flood
    changes = evaluator.take(frame({"loss": [math.nan], "grad/norm": [1.0]}, [31], ident=evaluator.upto + 1))
    changes += _end(evaluator, "oom", reason="the control group's limit")
    changes += _end(evaluator, "failed", rank=1, reason="ValueError")
    assert {change.finding.rule for change in fired(changes)} >= {"nonfinite_loss", "oom_observed"}
    assert "process_crash" in evaluator.machines


def test_what_a_user_said_long_ago_makes_room_for_what_is_said_now() -> None:
    evaluator = _trained()
    now = evaluator.window.now
    changes = [change for at in range(600) for change in _said(evaluator, f"best loss {at}", now + 70 * at)]
    assert (len(fired(changes)), evaluator.dropped) == (600, 0)
    assert len(evaluator.machines) <= 256 + 8
    changes += _said(evaluator, "best loss 0", now + 70 * 600)  # it made room long ago
    assert len({change.alert for change in fired(changes)}) == 601
    changes += _end(evaluator, "finished")
    assert {change.alert for change in changes if change.kind == "resolve"} == {
        change.alert for change in fired(changes)
    }


def test_what_another_program_reports_and_is_not_over_keeps_its_place() -> None:
    evaluator = _trained()
    now = evaluator.window.now
    for at in range(300):
        data = {"rule": f"of another program {at}", "severity": "warning", "message": "m"}
        event = Event(kind="finding", time=now, step=1, data=data)
        evaluator.take(frame({}, [], ident=evaluator.upto + 1, received=now + 7200 * at, events=[event]))
    assert evaluator.dropped == 44
    assert "of another program 0" in evaluator.machines


# --- the end with several ranks ---------------------------------------------------------------------------------------


def test_a_run_has_finished_when_every_rank_that_ever_reported_has() -> None:
    evaluator = make_evaluator()
    evaluator.take(frame({}, [], events=[state("starting", world_size=8)]))
    slow = {"phase/data_s": [0.05] * 60, "step_time_s": [0.1] * 60}
    for rank in (0, 1):
        evaluator.take(frame(slow, range(1, 61), rank=rank, ident=rank + 2))
    changes = evaluator.tick(evaluator.window.now + 20)
    assert [change.finding.rule for change in fired(changes)] == ["data_bound"]
    assert _end(evaluator, "finished", rank=0) == []
    assert [change.kind for change in _end(evaluator, "finished", rank=1)] == ["resolve"]
    assert evaluator.window.ended


def test_what_waited_for_ranks_that_never_came_is_judged_at_the_end() -> None:
    evaluator = make_evaluator()
    evaluator.take(frame({}, [], events=[state("starting", world_size=2)]))
    slow = {"phase/data_s": [0.05] * 60, "step_time_s": [0.1] * 60}
    assert evaluator.take(frame(slow, range(1, 61), ident=2)) == []
    assert [(change.kind, change.finding.rule) for change in _end(evaluator, "finished")] == [
        ("fire", "data_bound"),
        ("resolve", "data_bound"),
    ]


def test_a_rank_that_begins_when_the_others_have_finished_is_judged_and_waited_for() -> None:
    evaluator = _trained(30, **{"phase/data_s": [0.0] * 30})
    _end(evaluator, "finished", rank=0)
    changes = evaluator.take(
        frame({"phase/data_s": [0.05] * 60, "step_time_s": [0.1] * 60}, range(31, 91), rank=1, ident=evaluator.upto + 1)
    )
    changes += evaluator.tick(evaluator.window.now + 20)
    assert [change.finding.rule for change in fired(changes)] == ["data_bound"]
    evaluator = restored(evaluator)
    assert [change.kind for change in _end(evaluator, "finished", rank=1)] == ["resolve"]


def test_hundreds_of_ranks_finish_and_the_one_that_failed_after_them_is_heard() -> None:
    evaluator = _trained()
    for rank in range(200):
        evaluator.take(frame({}, [], rank=rank, ident=evaluator.upto + 1))
    for rank in range(199):
        _end(evaluator, "finished", rank=rank)
    assert not evaluator.window.ended
    changes = _end(evaluator, "failed", rank=199, reason="ValueError: bad shape")
    assert [change.finding.rule for change in fired(changes)] == ["process_crash"]
    other = _trained()
    for rank in range(200):
        other.take(frame({}, [], rank=rank, ident=other.upto + 1))
    for rank in range(200):
        _end(other, "finished", rank=rank)
    assert other.window.ended


def test_no_alert_opens_after_the_run_has_failed_that_nobody_would_resolve() -> None:
    evaluator = _trained()
    evaluator.take(frame({"loss": [2.0]}, [31], rank=1, ident=evaluator.upto + 1))
    _end(evaluator, "failed", rank=0, reason="ValueError: bad shape")
    slow = {"phase/data_s": [0.05] * 60, "step_time_s": [0.1] * 60}
    changes = evaluator.take(frame(slow, range(32, 92), rank=1, ident=evaluator.upto + 1))
    changes += evaluator.tick(evaluator.window.now + 60)
    assert changes == []
    assert [change.kind for change in _said(evaluator, "I am still here", evaluator.window.now)] == ["fire", "resolve"]
    assert evaluator.window.firing == {"process_crash"}


def test_the_earliest_failure_leads_in_whatever_order_the_ranks_report() -> None:
    evaluator = _trained()
    evaluator.window.world_size = 2
    now = evaluator.window.now

    def failed(rank: int, at: float, said: str) -> list:
        event = Event(kind="state", time=at, step=30, data={"state": "failed", "exception": said})
        return evaluator.take(frame({}, [], ident=evaluator.upto + 1, rank=rank, events=[event]))

    [first] = failed(0, now + 9, "DistBackendError: NCCL communicator was aborted")
    assert "NCCL" in first.finding.message
    [update] = failed(1, now + 3, "KeyError: 'labels'")
    assert (update.kind, update.alert) == ("update", first.alert)
    assert update.finding.message == "Rank 1 failed after step 30: KeyError: 'labels'"
    assert update.finding.evidence["exception"] == "KeyError: 'labels'"
    assert "KeyError" in evaluator.verdict().message


RESET = "RuntimeError: [pair.cc:537] Read error [10.0.0.2]:33976: Connection reset by peer. Check the logs of the remote worker"
CLOSED = "DistNetworkError: failed to recv, got 0 bytes. Connection was likely closed. Did the remote server crash?"


def _ended(evaluator: Evaluator, name: str, rank: int, after_s: float, said: str) -> list:
    event = Event(kind="state", time=evaluator.window.now + after_s, step=30, data={"state": name, "reason": said})
    evaluator.window.world_size = 2
    return evaluator.take(frame({}, [], ident=evaluator.upto + 1, rank=rank, events=[event]))


@pytest.mark.parametrize("said", [RESET, CLOSED, "DistBackendError: NCCL communicator was aborted on rank 0"])
@pytest.mark.parametrize(
    ("name", "cause"), [("killed", "killed by SIGKILL"), ("failed", "exit code 3"), ("failed", "KeyError: 'labels'")]
)
def test_a_rank_that_lost_its_peer_does_not_lead_before_the_peer(name: str, cause: str, said: str) -> None:
    """The peer's socket is closed before its death is seen, and its exception told after it."""
    evaluator = _trained()
    _ended(evaluator, "failed", 0, 0.0, said)
    _ended(evaluator, name, 1, 0.05, cause)
    found = evaluator.verdict()
    assert found.message.startswith("Rank 1 ")
    assert cause in found.message
    assert found.ranks == [0, 1]


def test_a_rank_that_the_launcher_kills_long_after_a_broken_connection_is_its_consequence() -> None:
    evaluator = _trained()
    _ended(evaluator, "failed", 0, 0.0, RESET)
    _ended(evaluator, "killed", 1, 30.0, "killed by SIGKILL")
    assert evaluator.verdict().message.startswith("Rank 0 failed")


def test_a_rank_that_lost_a_peer_of_which_nothing_is_known_sends_the_reader_there() -> None:
    evaluator = _trained()
    _ended(evaluator, "failed", 0, 0.0, RESET)
    assert "the other ranks" in evaluator.verdict().fix


def test_a_rank_that_lost_one_that_was_preempted_is_preempted_with_it() -> None:
    evaluator = _trained()
    _ended(evaluator, "failed", 0, 0.05, RESET)
    _ended(evaluator, "preempted", 1, 0.0, "terminated by SIGTERM")
    found = evaluator.verdict()
    assert (found.severity, found.message) == (
        "info",
        "Rank 1 was preempted (SIGTERM) after step 30: terminated by SIGTERM",
    )


def test_a_rank_that_is_terminated_because_another_lost_the_network_is_no_preemption() -> None:
    evaluator = _trained()
    _ended(evaluator, "preempted", 1, 0.1, "terminated by SIGTERM")
    _ended(evaluator, "failed", 0, 0.0, RESET)
    assert evaluator.verdict().message.startswith("Rank 0 failed")


def test_the_step_of_an_end_is_not_moved_by_what_other_ranks_tell_later() -> None:
    evaluator = _trained()
    evaluator.window.world_size = 2
    killed = state("killed", reason="killed by SIGKILL")
    [change] = evaluator.take(frame({}, [], ident=evaluator.upto + 1, rank=1, events=[killed]))
    evaluator.take(frame({"loss": [2.0] * 9}, range(31, 40), ident=evaluator.upto + 1))
    _ended(evaluator, "preempted", 0, 60.0, "terminated by SIGTERM")
    assert change.finding.message == evaluator.verdict().message == "Rank 1 was killed after step 30: killed by SIGKILL"


ELSEWHERE = "ConnectionResetError: [Errno 104] Connection reset by peer"


def test_a_reset_connection_to_something_else_than_a_rank_is_a_cause() -> None:
    """A dataset on a server, a database: the words are the system's own, for every socket."""
    evaluator = _trained()
    _ended(evaluator, "failed", 0, 0.0, ELSEWHERE)
    _ended(evaluator, "killed", 1, 2.0, "killed by SIGABRT")
    found = evaluator.verdict()
    assert found.message.startswith("Rank 0 failed")
    assert "the other ranks" not in found.fix


def test_a_rank_that_fails_long_after_a_preemption_failed() -> None:
    evaluator = _trained()
    _ended(evaluator, "preempted", 1, 0.0, "terminated by SIGTERM")
    _ended(evaluator, "failed", 0, 3600.0, RESET)
    assert evaluator.verdict().severity == "critical"
