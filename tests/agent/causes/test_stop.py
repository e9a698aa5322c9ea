"""A training that may be stopped from afar: whether it may, after which step, by what, and that nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import perfagent


def test_who_has_not_allowed_it_is_not_stopped(train):
    job = train()
    job.steps(2)
    job.command("stop")
    assert job.answers() == [("refused", {"key": "not_stoppable"})]
    job.steps(5)
    assert len(job.losses) == 7


def test_an_allowed_stop_leaves_the_loop_after_the_step(train):
    job = train()
    job.run.allow_stop()
    job.steps(2)
    job.command("stop", why="asked by Ann")
    job.command("stop", "c2", why="asked by Bob")
    with pytest.raises(perfagent.Stopped, match="stopped after step 3: asked by Ann") as left:
        job.steps(5)
    assert left.value.code == 0
    job.look()
    assert [state for state, _ in job.answers("c1") + job.answers("c2")] == ["accepted", "done", "accepted", "done"]


def test_rank_0_names_a_step_that_others_can_learn_in_time(train):
    job = train()
    job.run.allow_stop()
    job.sender.identity.world_size = 2
    job.steps(3)
    job.spoilt(lambda loss: loss * float("nan"))
    job.watch.history = lambda: [{"step": 1, "step_time_s": 0.1}, {"step": 2, "step_time_s": 0.1}]
    job.command("stop")
    (answer,) = job.events("command")
    assert answer["step"] == 4 + 2 + round(2.5 * job.sender.config.flush_s / 0.1)
    assert answer["saves"] is False, "after a NaN trainers write no checkpoint"


@pytest.mark.parametrize(("named", "last"), [(6, 6), (1, 3)])
def test_another_rank_ends_after_the_step_that_was_named(train, named: int, last: int):
    job = train()
    job.run.allow_stop()
    job.steps(2)
    job.command("stop", step=named, saves=False)
    with pytest.raises(perfagent.Stopped):
        job.steps(9)
    assert (job.progress.completed, job.watch.stop.saves) == (last, False)


def test_until_the_stop_training_is_bit_equal(train):
    def weights(*, stopped: bool) -> list[Any]:
        torch.manual_seed(3)
        job = train()
        if stopped:
            job.run.allow_stop()
            job.steps(4)
            job.command("stop", step=8)
            with pytest.raises(perfagent.Stopped):
                job.steps(9)
        else:
            job.steps(8)
        job.run.finish()
        return [job.losses[:7], *(p.detach().clone() for p in job.model.parameters())]

    (losses, *tensors), (others, *same) = weights(stopped=True), weights(stopped=False)
    assert losses == others
    assert all(map(torch.equal, tensors, same))


@pytest.mark.parametrize("odd", [1, "yes", None])
def test_stoppable_is_true_or_false(odd: Any):
    with pytest.raises(perfagent.ConfigError, match="stoppable must be True or False"):
        perfagent.attach(stoppable=odd)
