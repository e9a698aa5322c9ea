"""Whose steps are the run's, and which model is theirs, in loops that make optimizers again and again."""

from __future__ import annotations

import pytest
import torch
from agent.hooks.loops import READINGS_S, sgd, small, step, train
from agent.hooks.test_optimizer_step import rates

from perfagent.hooks.selection import optimizers
from perfagent.hooks.selection.models import search


@pytest.fixture
def looks(clock, monkeypatch):
    """One item for each search of the models; it takes 0.15 s."""
    made = []

    def slowly(*, models):
        made.append(models)
        clock.sleep(0.15)
        return search(models=models)

    monkeypatch.setattr(optimizers, "search", slowly)
    return made


def test_a_loop_that_begins_anew_is_not_searched_each_time(looks, record):
    recorded = record()
    for _ in range(40):
        model = small()
        train(model, sgd(model), 2)
    assert [number for number, _ in recorded.steps()] == [*range(1, 81)]
    assert len(looks) == 1 + 8, "of 15 s each: the first eight, and then once in a while"


def test_the_model_is_that_of_the_optimizer_that_counts(record):
    """Soft actor-critic: the first optimizer to step has but one number, which is in no model."""
    temperature, critic = torch.zeros(1, requires_grad=True), small()
    first, main = torch.optim.Adam([temperature], lr=0.1), torch.optim.Adam(critic.parameters(), lr=0.2)
    recorded = record()
    for _ in range(6):
        step(first, temperature * 0.3)
        train(critic, main)
    assert rates(recorded) == [0.2] * 6
    assert recorded.numbers("phase/forward_s") == [2, 3, 4, 5, 6]


def test_the_model_of_a_named_optimizer_is_found(every_step):
    model = small()
    optimizer = sgd(model)
    recorded = every_step(optimizer=optimizer)
    train(model, optimizer, 4)
    assert recorded.numbers("phase/forward_s") == [2, 3, 4]
    assert recorded.numbers("grad_norm/0.weight") == [2, 3, 4]


@pytest.mark.parametrize(("trainings", "steps"), [(3, 30), (5, 12)])
def test_the_next_of_several_trainings_that_are_kept_counts(clock, record, trainings, steps):
    """The members of an ensemble, the trials of a study: the first nine steps of the next one have numbers and no rows."""
    recorded, losses, kept = record(), [], []
    models = [small() for _ in range(trainings)]
    for number, model in enumerate(models, 1):
        kept.append(torch.optim.Adam(model.parameters(), lr=float(number)))
        losses += train(model, kept[-1], steps, after=lambda: clock.sleep(1.0))
    has_row = [at for at in range(trainings * steps) if at < steps or at % steps >= 9]
    told = recorded.steps()
    assert [number for number, _ in told] == [at + 1 for at in has_row]
    assert [values["loss"] for _, values in told] == [losses[at] for at in has_row]
    assert rates(recorded) == [float(at // steps + 1) for at in has_row]
    assert all(values["step_time_s"] == pytest.approx(1.0, abs=READINGS_S) for _, values in told[1:])


def test_what_is_trained_now_and_then_beside_never_counts(record):
    model, probe = small(), small()
    optimizer, now_and_then = sgd(model), sgd(probe, lr=0.2)
    recorded = record()
    for _ in range(4):
        train(model, optimizer, 12)
        train(probe, now_and_then, 8)
    assert rates(recorded) == [0.1] * 48


def test_two_over_the_same_parameters_in_turn_count_each(record):
    model = small()
    first, second = sgd(model), sgd(model, lr=0.2)
    recorded = record(model)
    for _ in range(6):
        train(model, first)
        train(model, second)
    assert rates(recorded) == [0.1, 0.2] * 6
