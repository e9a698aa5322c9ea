"""What an agent finds out joins the alert that it explains, whichever comes first."""

from __future__ import annotations

import math
from typing import Any

import pytest
from judging import fired, frame, judge_series, make_evaluator, restored, state

from perfagent.wire import Event
from perfagent_server.alerts.state_machine import Change
from perfagent_server.engine.evaluator import Evaluator

NAN = ("nonfinite_loss", "nonfinite_gradient")


def finding(step: int, message: str, *, rules: tuple[str, ...] = NAN, **evidence: Any) -> Event:
    data = {
        "rule": rules[0], "explains": list(rules), "severity": "critical", "message": message, "since_step": step,
        "evidence": {"step": step, **evidence},
    }  # fmt: skip
    return Event(kind="finding", time=1.0, step=step, data=data)


def nan_at(step: int) -> tuple[list[Change], Evaluator]:
    return judge_series({"loss": [1.0] * (step - 1) + [math.nan]})


def test_a_cause_that_comes_after_the_alert_joins_it_and_nobody_is_told_twice() -> None:
    changes, judge = nan_at(20)
    (alert,) = fired(changes, "nonfinite_loss")
    later = judge.take(frame({}, [], ident=99, events=[finding(20, "It began in 'head'.", module="head")]))
    assert [(change.kind, change.alert) for change in later] == [("update", alert.alert)]
    (found,) = judge.findings()
    assert found.message.endswith("It began in 'head'.")
    assert found.evidence["causes"] == [{"rank": 0, "message": "It began in 'head'.", "step": 20, "module": "head"}]
    assert found.evidence["last_losses"], "what the rule itself saw is still there"


def test_a_cause_that_comes_first_waits_for_its_alert_over_a_restart() -> None:
    _, judge = judge_series({"loss": [1.0] * 19})
    assert judge.take(frame({}, [], ident=50, events=[finding(20, "It began in 'head'.", module="head")])) == []
    judge = restored(judge)
    changes = judge.take(frame({"loss": [math.nan]}, [20], ident=51))
    (alert,) = fired(changes, "nonfinite_loss")
    assert alert.finding.evidence["causes"][0]["module"] == "head"


def test_a_cause_of_a_step_long_ago_does_not_join() -> None:
    _, judge = judge_series({"loss": [1.0] * 400})
    judge.take(frame({}, [], ident=50, events=[finding(20, "An old story.")]))
    changes = judge.take(frame({"loss": [math.nan]}, [401], ident=451))
    (alert,) = fired(changes, "nonfinite_loss")
    assert "causes" not in alert.finding.evidence


def test_each_rank_says_what_it_found_once() -> None:
    _, judge = nan_at(20)
    for ident, rank in ((90, 1), (91, 0), (92, 1)):
        judge.take(frame({}, [], ident=ident, rank=rank, events=[finding(20, f"Rank {rank} saw it.")]))
    (found,) = judge.findings()
    assert [cause["rank"] for cause in found.evidence["causes"]] == [0, 1]


def test_memory_forensics_of_a_process_that_then_ends_are_in_its_alert() -> None:
    _, judge = judge_series({"loss": [1.0] * 20})
    caught = finding(21, "GPU memory ran out.", rules=("oom_observed",), categories={"activations_and_other": 10})
    assert judge.take(frame({}, [], ident=50, events=[caught])) == [], "it may be caught, and training goes on"
    changes = judge.take(
        frame({}, [], ident=51, events=[state("oom", step=20, exception="OutOfMemoryError", reason="CUDA")])
    )
    (alert,) = fired(changes, "oom_observed")
    assert alert.finding.evidence["causes"][0]["categories"] == {"activations_and_other": 10}


def test_a_profile_stays_with_the_newest_figures_of_its_alert_and_leaves_the_advice_to_the_rule() -> None:
    def waiting(ident: int, wait_s: float) -> list[Change]:
        values = {"phase/data_s": [wait_s] * 10, "step_time_s": [0.1] * 10}
        return judge.take(frame(values, list(range(10 * ident, 10 * ident + 10)), ident=ident))

    judge = make_evaluator()
    changes = [change for ident in range(5) for change in waiting(ident, 0.03)]
    (alert,) = fired(changes, "data_bound")
    data = {
        "rule": "data_bound", "explains": ["data_bound"], "severity": "info", "since_step": alert.finding.since_step,
        "message": "A profile shows it.", "evidence": {"profile": "ab12"},
    }  # fmt: skip
    (joined,) = judge.take(frame({}, [], ident=50, events=[Event(kind="finding", time=1.0, step=300, data=data)]))
    assert (joined.kind, joined.alert) == ("update", alert.alert)
    for ident in range(60, 66):
        waiting(ident, 0.06)
    (found,) = [one for one in judge.findings() if one.rule == "data_bound"]
    assert "60 ms of 100 ms" in found.message
    assert found.message.endswith(" A profile shows it.")
    assert [cause["profile"] for cause in found.evidence["causes"]] == ["ab12"]


def test_what_explains_nothing_is_left_out() -> None:
    _, judge = nan_at(20)
    for ident, explains in ((60, "nonfinite_loss"), (61, [7]), (62, ["no_such_rule"])):
        event = finding(20, "x")
        event.data["explains"] = explains
        assert judge.take(frame({}, [], ident=ident, events=[event])) == []


@pytest.mark.parametrize("causes", [[1], None, "text", {"rank": 0}, [{"rank": "a"}], [{"rank": 0}], 7])
def test_evidence_of_a_sender_that_is_no_list_of_causes_is_none(causes: Any) -> None:
    """A finding under a rule's name, with anything under the name `causes`: it fires, and what explains it still
    joins."""
    judge = make_evaluator()
    told = {
        "rule": "hang",
        "severity": "critical",
        "message": "It hangs.",
        "since_step": 20,
        "evidence": {"causes": causes},
    }
    cause = finding(20, "Rank 0 waits in all_reduce.", rules=("hang",))
    event = Event(kind="finding", time=1.0, step=20, data=told)
    (alert,) = fired(judge.take(frame({"loss": [1.0]}, [20], events=[event])))
    assert alert.finding.rule == "hang"
    judge.take(frame({}, [], ident=2, events=[cause]))
    (found,) = judge.findings()
    assert [entry["message"] for entry in found.evidence["causes"]] == ["Rank 0 waits in all_reduce."]


@pytest.mark.parametrize("rank", ["abc", None, [1], math.nan])
def test_a_cause_is_of_the_rank_that_sent_it_whatever_its_evidence_says(rank: Any) -> None:
    _, judge = nan_at(20)
    for ident, sender in ((90, 1), (91, 0)):
        event = finding(20, f"Rank {sender} saw it.", rank=rank)
        event.data["evidence"] |= {"step": [1], "message": "not this"}
        judge.take(frame({}, [], ident=ident, rank=sender, events=[event]))
    (found,) = judge.findings()
    assert sorted((cause["rank"], cause["message"]) for cause in found.evidence["causes"]) == [
        (0, "Rank 0 saw it."), (1, "Rank 1 saw it."),
    ]  # fmt: skip


@pytest.mark.parametrize("first", [0, 1])
def test_the_rank_on_which_a_nan_began_is_told_whichever_ranks_frame_comes_first(first: int) -> None:
    """DDP: rank 1's loss is NaN in step 30; its gradients spoil the weights of both, and rank 0's follows in step
    31."""
    judge = make_evaluator()
    judge.take(frame({}, [], events=[state("starting", world_size=2)]))
    steps = range(1, 33)
    began = {0: 31, 1: 30}
    said = {0: "Every parameter was bad before step 31.", 1: "The batch of step 30 itself is bad."}
    changes: list[Change] = []
    for ident, rank in enumerate((first, 1 - first), 2):
        loss = [math.nan if step >= began[rank] else 1.0 for step in steps]
        changes += judge.take(frame({"loss": loss}, steps, rank=rank, ident=ident))
    for ident, rank in enumerate((first, 1 - first), 4):
        changes += judge.take(frame({}, [], rank=rank, ident=ident, events=[finding(began[rank], said[rank])]))
    assert len(fired(changes)) == 1
    assert len({change.alert for change in changes}) == 1
    for found in (*judge.findings(), changes[-1].finding):
        assert found.message == f"The loss became NaN in step 30 on rank 1; the last finite value was 1. {said[1]}"
        assert (found.since_step, found.evidence["step"], found.ranks) == (30, 30, [0, 1])
        assert [cause["rank"] for cause in found.evidence["causes"]] == [1, 0]


def test_a_loss_that_a_script_counts_from_0_does_not_take_over_the_alert_of_the_agents() -> None:
    _, judge = judge_series({"loss": [1.0] * 19 + [math.nan]})
    judge.take(frame({"train/loss": [1.0] * 19 + [math.nan]}, range(20), ident=70))
    (found,) = judge.findings()
    assert (found.since_step, found.evidence["series"]) == (20, "loss")


def test_what_explains_a_crash_is_a_sentence_of_its_own_behind_the_exception() -> None:
    """`if not torch.isfinite(loss): raise`: no row holds that loss."""
    _, judge = judge_series({"loss": [1.0] * 19})
    judge.take(frame({}, [], ident=50, events=[finding(20, "It began in 'head'.", rules=(*NAN, "process_crash"))]))
    end = state("failed", step=19, exception="RuntimeError", reason="RuntimeError: loss is NaN")
    changes = judge.take(frame({}, [], ident=51, events=[end]))
    (alert,) = fired(changes, "process_crash")
    assert alert.finding.message == "Rank 0 failed after step 19: RuntimeError: loss is NaN. It began in 'head'."


def test_what_filled_the_memory_is_a_sentence_of_its_own_behind_what_the_allocator_said() -> None:
    _, judge = judge_series({"loss": [1.0] * 19})
    cause = finding(20, "In step 20 an allocation failed.", rules=("oom_observed",))
    end = state("oom", step=19, exception="RuntimeError", reason="RuntimeError: can't allocate memory (error 12)")
    changes = judge.take(frame({}, [], ident=51, events=[cause, end]))
    (alert,) = fired(changes, "oom_observed")
    assert alert.finding.message.endswith(
        "RuntimeError: can't allocate memory (error 12). In step 20 an allocation failed."
    )
