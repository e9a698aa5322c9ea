"""Whose steps are the run's, and which model is theirs, in loops that make optimizers again and again."""

from __future__ import annotations

import copy
import time

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from truth import norm_of

from perfagent.hooks import optimizer_selection
from perfagent.hooks.model_discovery import search


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))


def train(model, optimizer, steps):
    for _ in range(steps):
        loss = model(torch.randn(4, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


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
            inner = torch.optim.SGD(adapted.parameters(), lr=0.2)
            train(adapted, inner, 3)
            adapted(torch.randn(4, 8)).square().mean().backward()
        for parameter, other in zip(model.parameters(), adapted.parameters(), strict=True):
            parameter.grad = other.grad
        outer.step()
    rates = [values["lr"] for _, values in recorded.steps()]
    assert rates == [0.2] * 3 * tasks + [0.1] * 19, "those before the outer one's first step cannot be told from it"


def test_a_loop_that_begins_anew_again_and_again_is_not_searched_each_time(record, monkeypatch):
    looks = []
    monkeypatch.setattr(optimizer_selection, "search", lambda *, models: looks.append(models) or ([], []))
    recorded = record()
    for _ in range(40):
        model = small()
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), 2)
        recorded.run._progress.look_at *= 1000  # a look takes long
    assert [step for step, _ in recorded.steps()] == [*range(1, 81)]
    assert len(looks) == 1 + optimizer_selection._LOOKS


def test_the_model_is_that_of_the_optimizer_that_counts(record):
    """Soft actor-critic: the first optimizer to step has but one number, which is in no model."""
    temperature, critic = torch.zeros(1, requires_grad=True), small()
    first, main = torch.optim.Adam([temperature], lr=0.1), torch.optim.Adam(critic.parameters(), lr=0.2)
    recorded = record()
    for _ in range(6):
        first.zero_grad()
        (temperature * 0.3).sum().backward()
        first.step()
        train(critic, main, 1)
    steps = recorded.steps()
    assert [values["lr"] for _, values in steps] == [0.2] * 6
    assert ["phase/forward_s" in values for _, values in steps] == [False] + [True] * 5


class LossOf(nn.Module):
    """A loss that holds the model it calls, as those of sentence-transformers do."""

    def __init__(self, model):
        super().__init__()
        self.model, self.scale = model, nn.Identity()

    def forward(self, x):
        return self.scale(self.model(x)).square().mean()


def test_where_several_losses_hold_the_model_it_is_the_model_that_is_watched(record):
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    losses = [LossOf(model), LossOf(model)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorded = record()
    for step in range(8):
        losses[step % 2](torch.ones(3, 4)).backward()
        optimizer.step()
    assert [step for step, _ in recorded.of("phase/forward_s")] == list(range(2, 9))


def test_the_next_of_several_trainings_counts_though_all_are_kept(record):
    """The members of an ensemble, one after the other: the first steps of each are told late."""
    members = [small() for _ in range(3)]
    losses = []
    for model in members:
        model.register_forward_hook(lambda *given: losses.append(given[-1].square().mean().item()))
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.1 * n) for n, model in enumerate(members, 1)]
    recorded = record()
    for model, optimizer in zip(members, optimizers, strict=True):
        train(model, optimizer, 30)
    steps = recorded.steps()
    assert [step for step, _ in steps] == [*range(1, 91)]
    assert [values["loss"] for _, values in steps] == losses
    assert all(values["step_time_s"] > 0 and values["phase/backward_s"] > 0 for _, values in steps[1:])
    assert [values["lr"] for _, values in steps] == pytest.approx([0.1] * 30 + [0.2] * 30 + [0.3] * 30)
    known = [step for step, values in steps if "phase/forward_s" in values]
    assert known == [*range(2, 31), *range(41, 61), *range(71, 91)]


def test_each_of_several_short_trainings_counts_though_all_are_kept(record):
    """A study whose trials are kept: what was told late of one has been its own from its first step on."""
    kept, losses = [], []
    recorded = record()
    for trial in range(1, 6):
        model = small()
        model.register_forward_hook(lambda *given: losses.append(given[-1].square().mean().item()))
        kept.append(torch.optim.Adam(model.parameters(), lr=0.1 * trial))
        train(model, kept[-1], 12)
    steps = recorded.steps()
    assert [step for step, _ in steps] == [*range(1, 61)]
    assert [values["loss"] for _, values in steps] == losses
    assert [values["lr"] for _, values in steps] == pytest.approx(
        [0.1 * trial for trial in range(1, 6) for _ in range(12)]
    )


def test_the_layers_of_the_next_training_have_their_names(every_step):
    """Those of its first step do not: the model is looked for behind it."""
    recorded = every_step()
    for _ in range(3):
        model = small()
        train(model, torch.optim.Adam(model.parameters(), lr=0.1), 4)
    assert [step for step, _ in recorded.of("grad_norm/0.weight")] == [1, 2, 3, 4, 6, 7, 8, 10, 11, 12]


def test_a_smaller_second_stage_is_told_from_its_first_step_on(record):
    """A linear probe after the pretraining, whose optimizer is kept; evaluated after each epoch."""
    model = small()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    recorded = record()
    train(model, optimizer, 5)
    head = nn.Linear(8, 1)
    other, losses = torch.optim.SGD(head.parameters(), lr=0.2), []
    for _ in range(8):
        for (x,) in DataLoader(TensorDataset(torch.randn(30, 8)), 3):
            loss = head(x).square().mean()
            losses.append(loss.item())
            other.zero_grad()
            loss.backward()
            other.step()
        with torch.no_grad():
            for (x,) in DataLoader(TensorDataset(torch.randn(30, 8)), 3):
                head(x).square().mean().item()
                time.sleep(0.001)
    steps = recorded.steps()[5:]
    assert [step for step, _ in steps] == [*range(6, 86)]
    assert [values["loss"] for _, values in steps] == losses
    assert [values["samples_per_s"] * values["step_time_s"] for _, values in steps] == pytest.approx([3] * 80)
    assert [step for step, values in steps if "phase/eval_s" in values] == [*range(16, 86, 10)]


def test_what_is_trained_now_and_then_beside_the_model_does_not_count(record):
    model, probe = small(), small()
    optimizer, now_and_then = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(probe.parameters(), lr=0.2)
    recorded = record()
    for _ in range(4):
        train(model, optimizer, 12)
        train(probe, now_and_then, 8)
    assert [values["lr"] for _, values in recorded.steps()] == [0.1] * 48


@pytest.mark.parametrize("again", [False, True], ids=["a class that is new", "a class that is timed from outside"])
def test_the_first_step_with_a_closure_after_another_optimizer_is_told_at_its_first_point(every_step, again):
    """Adam, then LBFGS: networks that solve differential equations are trained so."""
    recorded = every_step()
    told: list[tuple[float, float]] = []
    for _ in range(1 + again):
        torch.manual_seed(0)
        model = small()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        x = torch.randn(32, 8)
        train(model, optimizer, 3)
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)
        told += [(float("nan"), float("nan"))] * 3
        for _ in range(2):
            seen = []

            def closure(model=model, optimizer=optimizer, x=x, seen=seen):
                optimizer.zero_grad()
                loss = (model(x) - 1).square().mean()
                loss.backward()
                seen.append((loss.item(), norm_of(model.parameters())))
                return loss

            optimizer.step(closure)
            assert len(seen) > 1
            told.append(seen[0])
        del closure
    expected = {n: one for n, one in enumerate(told, 1) if one[0] == one[0]}
    losses, norms = dict(recorded.of("loss")), dict(recorded.of("grad/norm"))
    assert {n: losses[n] for n in expected} == {n: loss for n, (loss, _) in expected.items()}
    assert {n: norms[n] for n in expected} == {n: pytest.approx(norm, rel=1e-5) for n, (_, norm) in expected.items()}


def test_a_model_that_was_not_looked_for_is_found_later(record):
    recorded = record()
    for fold in range(2):
        model = small()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if fold:
            recorded.run._progress.look_at = 2**63  # no look for a while
        train(model, optimizer, 4)
        if not fold:
            del model, optimizer
    recorded.run._progress.look_at = 0
    recorded.run._watching.poll()
    train(model, optimizer, 4)
    missing = [step for step, values in recorded.steps() if "phase/forward_s" not in values]
    assert missing == [1, 5, 6, 7, 8, 9], "it is looked for at the end of a step"


def test_parameters_that_are_in_no_model_are_not_looked_for_again_and_again(record, monkeypatch):
    looks = []
    monkeypatch.setattr(optimizer_selection, "search", lambda *, models: looks.append(models) or search(models=models))
    recorded = record()
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer, 4)
    del model, optimizer
    weight = torch.ones(8, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(20):
        train(weight.mul, optimizer, 1)
        recorded.run._watching.poll()
    assert [step for step, _ in recorded.steps()] == [*range(1, 25)]
    assert len(looks) == 2, "one for each optimizer"
