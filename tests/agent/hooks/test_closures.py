"""Optimizers that are given a closure: what is told of a step is of the weights it begins at, as its loss is."""

from __future__ import annotations

import math
import statistics
import time
import types

import pytest
import torch
from torch import nn
from truth import norm_of

NAP_S = 0.02


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def trained(model, optimizer, *, clip=None, windows=1, by_name=False, steps=4) -> list[list[tuple[float, float]]]:
    """For each step loss and norm of each evaluation."""
    torch.manual_seed(1)
    x, y = torch.randn(32, 8), torch.randn(32, 1)
    told = []
    for _ in range(steps):
        seen: list[tuple[float, float]] = []

        def closure(seen=seen):
            optimizer.zero_grad()
            losses = []
            for part, target in zip(x.chunk(windows), y.chunk(windows), strict=True):
                loss = 20 * (model(part) - target).square().mean() / windows
                loss.backward()
                losses.append(loss.item())
            seen.append((math.fsum(losses), norm_of(model.parameters())))
            if clip == "norm":
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if clip == "value":
                nn.utils.clip_grad_value_(model.parameters(), 0.01)
            return loss

        if by_name:
            optimizer.step(closure=closure)
        else:
            optimizer.step(closure)
        told.append(seen)
    return told


@pytest.mark.parametrize("clip", [None, "norm", "value"])
@pytest.mark.parametrize("by_name", [False, True])
def test_the_norm_is_of_the_same_weights_as_the_loss(record, clip, by_name):
    model = small()
    recorded = record(model, overhead_budget_pct=1e9)
    seen = trained(model, torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4), clip=clip, by_name=by_name)
    assert all(len(step) > 1 for step in seen)
    assert [loss for _, loss in recorded.of("loss")] == [step[0][0] for step in seen]
    assert dict(recorded.of("grad/norm")) == {n: pytest.approx(step[0][1], rel=1e-5) for n, step in enumerate(seen, 1)}


def test_clipping_alone_tells_it_too(record):
    """Steps in which nothing is measured."""
    model = small()
    recorded = record(model)
    recorded.run._progress.measure_at = 2**60
    seen = trained(model, torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4), clip="norm")
    assert dict(recorded.of("grad/norm")) == {n: pytest.approx(step[0][1], rel=1e-5) for n, step in enumerate(seen, 1)}


def test_micro_batches_inside_of_a_closure_are_one_gradient(record):
    model = small()
    recorded = record(model, overhead_budget_pct=1e9)
    seen = trained(model, torch.optim.SGD(model.parameters(), lr=1e-3), windows=4)
    assert dict(recorded.of("grad/norm")) == {n: pytest.approx(step[0][1], rel=1e-5) for n, step in enumerate(seen, 1)}
    assert recorded.of("update/ratio"), "the closure returns before a weight is moved"


def test_the_closure_is_called_as_it_was_and_its_answer_returned(record):
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    recorded = record(model, overhead_budget_pct=1e9)
    calls = []

    def closure():
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = model(torch.ones(2, 8)).square().mean()
        loss.backward()
        return loss

    answers = [optimizer.step(closure) for _ in range(3)]
    assert calls == [True] * 3
    assert [value for _, value in recorded.of("loss")] == [answer.item() for answer in answers]


def test_a_closure_that_raises_reaches_the_script_and_the_next_step_is_told(record):
    model = small()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)
    recorded = record(model, optimizer=optimizer, overhead_budget_pct=1e9)

    def bad():
        raise KeyError("from the script")

    seen = trained(model, optimizer, steps=2)
    with pytest.raises(KeyError, match="from the script"):
        optimizer.step(bad)
    seen += trained(model, optimizer, steps=2)
    assert [norm for _, norm in recorded.of("grad/norm")] == pytest.approx([step[0][1] for step in seen], rel=1e-5)


@pytest.mark.parametrize("clip", [None, "norm", "value"])
@pytest.mark.parametrize("call", [1, 2, 3], ids=["1st call", "2nd call", "3rd call"])
def test_of_a_step_whose_closure_raised_nothing_is_told_with_the_next(record, clip, call):
    model = small()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    recorded = record(model, optimizer=optimizer, overhead_budget_pct=1e9)
    seen = trained(model, optimizer, clip=clip, steps=2)
    calls, step = [], optimizer.step

    def breaking(closure):
        def counted():
            loss = closure()
            calls.append(norm_of(model.parameters()))
            if len(calls) == call:
                raise KeyError("from the script")
            return loss

        step(counted)

    with pytest.raises(KeyError, match="from the script"):
        trained(model, types.SimpleNamespace(step=breaking, zero_grad=optimizer.zero_grad), clip=clip, steps=1)
    assert len(calls) == call
    seen += trained(model, optimizer, clip=clip, steps=3)
    assert [loss for _, loss in recorded.of("loss")] == [step[0][0] for step in seen]
    assert dict(recorded.of("grad/norm")) == {n: pytest.approx(step[0][1], rel=1e-5) for n, step in enumerate(seen, 1)}
    assert [n for n, _ in recorded.of("grad_norm/0.weight")] == [1, 2, 3, 4, 5]


def test_nor_where_a_teacher_is_called_in_the_closure(record):
    model, teacher = small(), small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    recorded = record(model, optimizer=optimizer, overhead_budget_pct=1e9)
    told = []

    def closure(*, breaks=False):
        optimizer.zero_grad()
        with torch.no_grad():
            wanted = teacher(torch.ones(2, 8)) + 1
        loss = (model(torch.ones(2, 8)) - wanted).square().mean() * (1 + breaks)
        loss.backward()
        if breaks:
            raise KeyError("from the script")
        told.append(loss.item())
        return loss

    for _ in range(6):
        optimizer.step(closure)
    with pytest.raises(KeyError, match="from the script"):
        optimizer.step(lambda: closure(breaks=True))
    for _ in range(3):
        optimizer.step(closure)
    assert [loss for _, loss in recorded.of("loss")] == told


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, torch.optim.SGD, torch.optim.Adam])
def test_weights_are_the_same_bits(record, kind):
    def weights(watched: bool) -> list[torch.Tensor]:
        model = small()
        recorded = record(model, overhead_budget_pct=1e9) if watched else None
        trained(model, kind(model.parameters(), lr=0.01), clip="norm")
        if recorded is not None:
            recorded.finish()
        return [parameter.detach().clone() for parameter in model.parameters()]

    alone = weights(False)
    assert all(torch.equal(one, other) for one, other in zip(alone, weights(True), strict=True))


def test_steps_with_a_closure_and_clipped_ones_without_take_turns(record):
    model = small()
    recorded = record(model, overhead_budget_pct=1e9)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    true = []
    for _ in range(3):
        ((_, norm),) = trained(model, optimizer, steps=1)[0]
        optimizer.zero_grad()
        (20 * model(torch.randn(4, 8)).square().mean()).backward()
        true += [norm, norm_of(model.parameters())]
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
    assert [norm for _, norm in recorded.of("grad/norm")] == pytest.approx(true, rel=1e-5)
    assert [step for step, _ in recorded.of("grad_norm/0.weight")] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("by_name", [False, True])
def test_the_closure_of_an_optimizer_with_a_scheduler_is_seen_too(record, by_name):
    """The scheduler puts a `step` of its own on the instance."""
    model = small()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    recorded = record(model, overhead_budget_pct=1e9)
    seen = trained(model, optimizer, by_name=by_name)
    assert "step" in optimizer.__dict__, "else this tests nothing"
    assert dict(recorded.of("grad/norm")) == {n: pytest.approx(step[0][1], rel=1e-5) for n, step in enumerate(seen, 1)}
    assert scheduler.last_epoch == 0


class Slow(nn.Linear):
    """Takes NAP_S in its forward pass, and as much in backward's."""

    def forward(self, x):
        time.sleep(NAP_S)
        out = super().forward(x)
        out.register_hook(lambda _gradient: time.sleep(NAP_S))
        return out


def test_what_is_done_in_a_closure_is_no_time_of_the_optimizers(record):
    model = Slow(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    recorded = record(model, optimizer=optimizer)

    def closure():
        optimizer.zero_grad()
        model(torch.ones(2, 4)).square().mean().backward()
        with recorded.run.phase("rewards"):
            time.sleep(NAP_S)

    for _ in range(7):
        optimizer.step(closure)
    recorded.finish()
    for name in ("forward", "backward", "rewards"):
        seconds = [value for step, value in recorded.of(f"phase/{name}_s") if step > 1]
        assert min(seconds) >= NAP_S
        assert statistics.median(seconds) < 2 * NAP_S
    assert statistics.median(value for step, value in recorded.of("phase/optimizer_s") if step > 1) < NAP_S


def test_nor_where_the_closure_calls_no_module(clock, record):
    """A network of plain tensors that solves a differential equation; the first step with a model that is yet to be
    found."""
    weight = torch.ones(4, 1, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight], lr=0.01, max_iter=2)
    recorded = record(optimizer=optimizer)

    def closure():
        optimizer.zero_grad()
        clock.sleep(NAP_S)
        loss = (torch.ones(2, 4) @ weight).square().mean()
        loss.backward()
        return loss

    for _ in range(5):
        optimizer.step(closure)
    recorded.finish()
    assert max(value for _, value in recorded.of("phase/optimizer_s")) < NAP_S
    assert not [
        name for _, values in recorded.rows for name in values if name in ("phase/", "phase/_s", "phase/forward_s")
    ]


def test_a_phase_inside_of_the_backward_pass_is_told_once(record):
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    recorded = record(model, optimizer=optimizer)

    def naps(_gradient):
        with recorded.run.phase("exchange"):
            time.sleep(NAP_S)

    for _ in range(7):
        optimizer.zero_grad()
        out = model(torch.ones(2, 4))
        out.register_hook(naps)
        out.square().mean().backward()
        optimizer.step()
    recorded.finish()
    assert min(value for _, value in recorded.of("phase/exchange_s")) >= NAP_S
    assert statistics.median(value for _, value in recorded.of("phase/backward_s")) < NAP_S
