"""Whose steps are the run's, and which model is theirs, in loops that make optimizers again and again."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from agent.hooks.loops import sgd, small, step, train
from torch import nn
from torch.utils.data import DataLoader
from truth import norm_of

from perfagent.hooks import optimizer_selection
from perfagent.hooks.model_discovery import search


def rates(recorded):
    return [values["lr"] for _, values in recorded.steps()]


@pytest.fixture
def looks(clock, monkeypatch):
    """One item for each search of the models; it takes 0.15 s."""
    made = []

    def slowly(*, models):
        made.append(models)
        clock.sleep(0.15)
        return search(models=models)

    monkeypatch.setattr(optimizer_selection, "search", slowly)
    return made


@pytest.mark.parametrize("tasks", [1, 3])
def test_optimizers_of_inner_loops_are_not_the_runs(record, tasks):
    """Meta-learning to first order: each task has a copy and an optimizer of its own, whose last gradients are the
    model's."""
    model = small()
    outer = torch.optim.Adam(model.parameters(), lr=0.1)
    recorded = record()
    for _ in range(20):
        for _ in range(tasks):
            adapted = copy.deepcopy(model)
            inner = sgd(adapted, lr=0.2)
            train(adapted, inner, 3)
            adapted(torch.randn(4, 8)).square().mean().backward()
        for parameter, other in zip(model.parameters(), adapted.parameters(), strict=True):
            parameter.grad = other.grad
        outer.step()
    # those before the outer one's first step cannot be told from it
    assert rates(recorded) == [0.2] * 3 * tasks + [0.1] * 19


def test_a_loop_that_begins_anew_is_not_searched_each_time(looks, record):
    recorded = record()
    for _ in range(40):
        model = small()
        train(model, sgd(model), 2)
    assert [number for number, _ in recorded.steps()] == [*range(1, 81)]
    assert len(looks) == 1 + 8, "of 15 s each: the first eight, and then once in a while"


def test_parameters_in_no_model_are_not_looked_for_again(looks, record):
    recorded = record()
    model = small()
    train(model, sgd(model), 4)
    del model
    weight = torch.ones(8, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(20):
        train(weight.mul, optimizer)
        recorded.poll()
    assert [number for number, _ in recorded.steps()] == [*range(1, 25)]
    assert len(looks) == 2, "one for each optimizer"


def test_a_model_that_was_not_looked_for_is_found_later(looks, clock, record):
    recorded = record()
    for _ in range(10):  # more than are looked for at once
        model = small()
        optimizer = sgd(model)
        train(model, optimizer, 4)
    clock.sleep(100.0)
    recorded.poll()
    train(model, optimizer, 4)
    missing = [number for number, values in recorded.steps() if "phase/forward_s" not in values]
    assert missing == [*range(1, 37, 4), 37, 38, 39, 40, 41], "it is looked for at the end of a step"


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


class LossOf(nn.Module):
    """A loss that holds the model it calls, as those of sentence-transformers do."""

    def __init__(self, model):
        super().__init__()
        self.model, self.scale = model, nn.Identity()

    def forward(self, x):
        return self.scale(self.model(x)).square().mean()


def test_of_several_losses_that_hold_the_model_it_is_watched(record):
    model = small()
    losses = [LossOf(model), LossOf(model)]
    optimizer, recorded = sgd(model), record()
    for number in range(8):
        step(optimizer, losses[number % 2](torch.ones(3, 8)))
    assert recorded.numbers("phase/forward_s") == list(range(2, 9))


@pytest.mark.parametrize(("trainings", "steps"), [(3, 30), (5, 12)])
def test_the_next_of_several_trainings_that_are_kept_counts(record, trainings, steps):
    """The members of an ensemble, the trials of a study: what was told late of one has been its own from its first step
    on."""
    recorded, losses, kept = record(), [], []
    models = [small() for _ in range(trainings)]
    for number, model in enumerate(models, 1):
        kept.append(torch.optim.Adam(model.parameters(), lr=float(number)))
        losses += train(model, kept[-1], steps)
    told = recorded.steps()
    assert [number for number, _ in told] == [*range(1, trainings * steps + 1)]
    assert [values["loss"] for _, values in told] == losses
    assert rates(recorded) == [float(number) for number in range(1, trainings + 1) for _ in range(steps)]
    assert all(values["step_time_s"] > 0 and values["phase/backward_s"] > 0 for _, values in told[1:])
    if steps == 30:
        assert recorded.numbers("phase/forward_s") == [*range(2, 31), *range(41, 61), *range(71, 91)]


def test_the_layers_of_the_next_training_have_their_names(every_step):
    """Those of its first step do not: the model is looked for behind it."""
    recorded = every_step()
    for _ in range(3):
        model = small()
        train(model, torch.optim.Adam(model.parameters(), lr=0.1), 4)
    assert recorded.numbers("grad_norm/0.weight") == [1, 2, 3, 4, 6, 7, 8, 10, 11, 12]


def test_a_smaller_second_stage_is_told_from_its_first_step_on(clock, record):
    """A linear probe after the pretraining, whose optimizer is kept; evaluated after each epoch."""
    model = small()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    recorded = record()
    train(model, optimizer, 5)
    head = nn.Linear(8, 1)
    other, losses = sgd(head, lr=0.2), []
    for _ in range(8):
        for x in DataLoader(torch.randn(30, 8), 3):
            loss = head(x).square().mean()
            losses.append(loss.item())
            step(other, loss)
        with torch.no_grad():
            for x in DataLoader(torch.randn(30, 8), 3):
                head(x)
                clock.sleep(0.001)
    assert [values["loss"] for number, values in recorded.steps() if number > 5] == losses
    consumed = recorded.consumed()
    assert {number: consumed[number] for number in range(6, 86)} == dict.fromkeys(range(6, 86), 3)
    assert [number for number in recorded.numbers("phase/eval_s") if number < 85] == [*range(16, 85, 10)]


def test_what_is_trained_now_and_then_beside_never_counts(record):
    model, probe = small(), small()
    optimizer, now_and_then = sgd(model), sgd(probe, lr=0.2)
    recorded = record()
    for _ in range(4):
        train(model, optimizer, 12)
        train(probe, now_and_then, 8)
    assert rates(recorded) == [0.1] * 48


@pytest.mark.parametrize("again", [False, True], ids=["a class that is new", "a class that is timed from outside"])
def test_the_first_closure_after_another_optimizer_is_told_whole(every_step, again):
    """Adam, then LBFGS: networks that solve differential equations are trained so."""
    recorded, told = every_step(), []
    for _ in range(1 + again):
        model, x = small(seed=0), torch.randn(32, 8)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        train(model, optimizer, 3)
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)
        told += [(math.nan, math.nan)] * 3
        for _ in range(2):
            seen = []

            def closure(model=model, optimizer=optimizer, x=x, seen=seen):
                optimizer.zero_grad()
                loss = (model(x) - 1).square().mean()
                loss.backward()
                seen.append((loss.item(), pytest.approx(norm_of(model.parameters()), rel=1e-5)))
                return loss

            optimizer.step(closure)
            assert len(seen) > 1
            told.append(seen[0])
        del closure
    losses, norms = recorded.series("loss"), recorded.series("grad/norm")
    expected = {number: one for number, one in enumerate(told, 1) if one[0] == one[0]}
    assert {number: (losses[number], norms[number]) for number in expected} == expected
