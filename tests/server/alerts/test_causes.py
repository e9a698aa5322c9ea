"""What an agent finds out joins the alert that it explains, whichever comes first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
from judging import fired, frame, judge_series, make_evaluator, restored, state

from perfagent.wire import Event
from perfagent_server.alerts.state_machine import Change
from perfagent_server.engine.evaluator import Evaluator

NAN = ("nonfinite_loss", "nonfinite_gradient")


def finding(step: int, message: str, *, rules: Sequence[str] = NAN, **evidence: Any) -> Event:
    data = {
        "rule": rules[0], "explains": list(rules), "severity": "critical", "message": message, "since_step": step,
        "evidence": {"step": step, **evidence},
    }  # fmt: skip
    return Event(kind="finding", time=1.0, step=step, data=data)


def tell(judge: Evaluator, *events: Event, rank: int = 0) -> list[Change]:
    return judge.take(frame({}, [], ident=judge.upto + 1, rank=rank, events=events))


def nan_at(step: int) -> tuple[list[Change], Evaluator]:
    return judge_series({"loss": [1.0] * (step - 1) + [math.nan]})


def test_a_cause_that_comes_after_the_alert_joins_it() -> None:
    changes, judge = nan_at(20)
    (alert,) = fired(changes, "nonfinite_loss")
    later = tell(judge, finding(20, "It began in 'head'.", module="head"))
    assert [(change.kind, change.alert) for change in later] == [("update", alert.alert)], "nobody is told twice"
    (found,) = judge.findings()
    assert found.message.endswith("It began in 'head'.")
    assert found.evidence["causes"] == [{"rank": 0, "message": "It began in 'head'.", "step": 20, "module": "head"}]
    assert found.evidence["last_losses"], "what the rule itself saw is still there"


def test_cause_that_comes_first_waits_for_its_alert() -> None:
    _, judge = judge_series({"loss": [1.0] * 19})
    assert tell(judge, finding(20, "It began in 'head'.", module="head")) == []
    judge = restored(judge)
    (alert,) = fired(judge.take(frame({"loss": [math.nan]}, [20], ident=51)), "nonfinite_loss")
    assert alert.finding.evidence["causes"][0]["module"] == "head"


def test_a_cause_of_a_step_long_ago_does_not_join() -> None:
    _, judge = judge_series({"loss": [1.0] * 400})
    tell(judge, finding(20, "An old story."))
    (alert,) = fired(judge.take(frame({"loss": [math.nan]}, [401], ident=451)), "nonfinite_loss")
    assert "causes" not in alert.finding.evidence


def test_memory_forensics_of_an_ended_process_are_in_its_alert() -> None:
    _, judge = judge_series({"loss": [1.0] * 20})
    caught = finding(21, "GPU memory ran out.", rules=["oom_observed"], categories={"activations_and_other": 10})
    assert tell(judge, caught) == [], "it may be caught, and training goes on"
    reason = "RuntimeError: can't allocate memory (error 12)"
    changes = tell(judge, state("oom", step=20, exception="RuntimeError", reason=reason))
    (alert,) = fired(changes, "oom_observed")
    assert alert.finding.evidence["causes"][0]["categories"] == {"activations_and_other": 10}
    assert alert.finding.message.endswith(f"{reason}. GPU memory ran out.")


def test_a_profile_stays_with_the_newest_figures_of_its_alert() -> None:
    judge = make_evaluator()

    def waiting(ident: int, wait_s: float) -> list[Change]:
        values = {"phase/data_s": [wait_s] * 10, "step_time_s": [0.1] * 10}
        return judge.take(frame(values, list(range(10 * ident, 10 * ident + 10)), ident=ident))

    (alert,) = fired([change for ident in range(5) for change in waiting(ident, 0.03)], "data_bound")
    profile = finding(alert.finding.since_step or 0, "A profile shows it.", rules=["data_bound"], profile="ab12")
    profile.data["severity"] = "info"
    (joined,) = judge.take(frame({}, [], ident=50, events=[profile]))
    assert (joined.kind, joined.alert) == ("update", alert.alert)
    for ident in range(60, 66):
        waiting(ident, 0.06)
    (found,) = [one for one in judge.findings() if one.rule == "data_bound"]
    assert "60 ms of 100 ms" in found.message
    assert found.message.endswith(" A profile shows it.")
    assert [cause["profile"] for cause in found.evidence["causes"]] == ["ab12"]


@pytest.mark.parametrize("explains", ["nonfinite_loss", [7], ["no_such_rule"]])
def test_what_explains_nothing_is_left_out(explains: Any) -> None:
    _, judge = nan_at(20)
    event = finding(20, "x")
    event.data["explains"] = explains
    assert tell(judge, event) == []


@pytest.mark.parametrize("rank", ["abc", None, [1], math.nan])
def test_a_cause_is_of_the_rank_that_sent_it_and_told_once(rank: Any) -> None:
    _, judge = nan_at(20)
    for sender in (1, 0, 1):
        event = finding(20, f"Rank {sender} saw it.", rank=rank)
        event.data["evidence"] |= {"step": [1], "message": "not this"}
        tell(judge, event, rank=sender)
    (found,) = judge.findings()
    assert [(cause["rank"], cause["message"]) for cause in found.evidence["causes"]] == [
        (0, "Rank 0 saw it."), (1, "Rank 1 saw it."),
    ]  # fmt: skip


@pytest.mark.parametrize("first", [0, 1])
def test_rank_where_a_nan_began_is_told_in_any_order_of_frames(first: int) -> None:
    """DDP: rank 1's loss is NaN in step 30; its gradients spoil the weights of both, and rank 0's follows in step
    31."""
    judge = make_evaluator()
    tell(judge, state("starting", world_size=2))
    began = {0: 31, 1: 30}
    said = {0: "Every parameter was bad before step 31.", 1: "The batch of step 30 itself is bad."}
    changes: list[Change] = []
    for rank in (first, 1 - first):
        loss = [math.nan if step >= began[rank] else 1.0 for step in range(1, 33)]
        changes += judge.take(frame({"loss": loss}, range(1, 33), rank=rank, ident=judge.upto + 1))
    for rank in (first, 1 - first):
        changes += tell(judge, finding(began[rank], said[rank]), rank=rank)
    assert len(fired(changes)) == len({change.alert for change in changes}) == 1
    for found in (*judge.findings(), changes[-1].finding):
        assert found.message == f"The loss became NaN in step 30 on rank 1; the last finite value was 1. {said[1]}"
        assert (found.since_step, found.evidence["step"], found.ranks) == (30, 30, [0, 1])
        assert [cause["rank"] for cause in found.evidence["causes"]] == [1, 0]


def test_explanation_of_a_crash_follows_the_exception() -> None:
    """`if not torch.isfinite(loss): raise`: no row holds that loss."""
    _, judge = judge_series({"loss": [1.0] * 19})
    tell(judge, finding(20, "It began in 'head'.", rules=(*NAN, "process_crash")))
    changes = tell(judge, state("failed", step=19, exception="RuntimeError", reason="RuntimeError: loss is NaN"))
    (alert,) = fired(changes, "process_crash")
    assert alert.finding.message == "Rank 0 failed after step 19: RuntimeError: loss is NaN. It began in 'head'."
