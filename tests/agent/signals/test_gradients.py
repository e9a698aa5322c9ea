"""Gradient norms from one pass: what torch's own clipping would compute, and what clipping computed already."""

from __future__ import annotations

import math
from typing import ClassVar

import pytest
import torch
from builders import until
from torch import nn
from truth import norm_of

from perfagent.boundary import guard
from perfagent.signals.gradients import Plan, gradients_of, norms
from perfagent.step.state import state


def result(gradients, plan=None):
    """Global norm, and how many parameters have a gradient with NaN or Inf."""
    report = norms(gradients, plan).report()
    return math.sqrt(report.square_sum), len(report.nonfinite)


def test_the_norm_is_the_one_clipping_computes():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    norm, nonfinite = result(gradients_of(optimizer))
    assert norm == pytest.approx(float(nn.utils.clip_grad_norm_(model.parameters(), 1e9)), rel=1e-6)
    assert nonfinite == 0


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_parameters_with_nan_or_inf_are_counted(poison):
    gradients = [torch.ones(3), torch.tensor([1.0, poison]), torch.ones(2, 2)]
    norm, nonfinite = result(gradients)
    assert nonfinite == 1
    assert not math.isfinite(norm)


def test_types_may_be_mixed_and_half_precision_does_not_overflow():
    gradients = [
        torch.full((1000,), 1000.0, dtype=torch.float16),
        torch.ones(4, dtype=torch.float64),
        torch.ones(4, dtype=torch.bfloat16),
    ]
    norm, nonfinite = result(gradients)
    assert norm == pytest.approx(math.sqrt(1000 * 1e6 + 8), rel=1e-3)
    assert nonfinite == 0


def test_duplicates_of_a_sparse_gradient_count_together():
    table = nn.Embedding(10, 2, sparse=True)
    table(torch.tensor([3, 3])).sum().backward()
    assert result([table.weight.grad]) == (pytest.approx(math.sqrt(8)), 0)


def test_without_gradients_there_is_nothing_to_say():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    assert norms(gradients_of(optimizer)) is None


def test_the_norm_before_clipping_is_reported_every_step(record):
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorded = record(model)
    computed = []
    for _ in range(4):
        (100 * model(torch.randn(4, 8)).square().mean()).backward()
        computed.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
    assert [norm for _, norm in recorded.of("grad/norm")] == computed
    assert [count for _, count in recorded.of("grad/nonfinite")] == [0, 0, 0, 0]


def test_clipping_by_another_norm_still_reports_the_two_norm_before_it(record):
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorded = record(model)
    (100 * model(torch.randn(4, 8)).square().mean()).backward()
    before = math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters()))
    nn.utils.clip_grad_norm_(model.parameters(), 0.5, norm_type=float("inf"))
    optimizer.step()
    assert recorded.of("grad/norm") == [(1, pytest.approx(before, rel=1e-6))]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("measured", [True, False])
def test_gradients_clipped_before_unscaling_have_the_norm_before_both(record, measured, fused):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
    recorded = record(model, overhead_budget_pct=1e9 if measured else 1e-9)
    true = []
    for _ in range(4):
        scaler.scale(model(torch.randn(4, 8)).square().mean()).backward()
        true.append(norm_of(model.parameters()) / 65536)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # a mistake users make: without unscale_
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert [norm for _, norm in recorded.of("grad/norm")] == pytest.approx(true, rel=1e-5)
    assert recorded.of("grad/clipped_scaled") == [(step, 1.0) for step in (1, 2, 3, 4)]
    if measured:
        layers = [values for _, values in recorded.rows if "grad_norm/0.weight" in values]
        squares = [sum(value**2 for name, value in row.items() if name.startswith("grad_norm/")) for row in layers]
        assert [square**0.5 for square in squares] == pytest.approx(true[1:], rel=1e-5), (
            "no optimizer is known at first"
        )


def test_gradients_clipped_after_unscaling_raise_no_doubt(record):
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    recorded = record(model)
    scaler.scale(model(torch.randn(4, 8)).square().mean()).backward()
    true = norm_of(model.parameters()) / 1024
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    scaler.step(optimizer)
    scaler.update()
    assert recorded.of("grad/norm") == [(1, pytest.approx(true, rel=1e-5))]
    assert recorded.of("grad/clipped_scaled") == []


def test_gradients_that_step_as_they_were_clipped_have_that_norm(record):
    """Scaled by a scaler, unscaled by hand."""
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    recorded = record(model)
    scaler.scale(model(torch.randn(4, 8)).square().mean()).backward()
    for parameter in model.parameters():
        parameter.grad.div_(1024.0)
    true = norm_of(model.parameters())
    nn.utils.clip_grad_norm_(model.parameters(), true / 4)
    optimizer.step()
    assert recorded.of("grad/norm") == [(1, pytest.approx(true, rel=1e-5))]


def test_nan_is_counted_before_clipping_spreads_it(record):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorded = record(model)
    model(torch.randn(4, 8)).mean().backward()
    model[1].bias.grad.fill_(float("nan"))
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert all(p.grad.isnan().all() for p in model.parameters())
    optimizer.step()
    assert recorded.of("grad/nonfinite") == [(1, 1)]


# ---- layers, shares, counts ------------------------------------------------------------------------------------------


@pytest.fixture
def everything(record):
    """everything(model, optimizer): a run that looks at gradients, weights and units in every step."""

    def start(model, optimizer=None):
        recorded = record(model, optimizer=optimizer, overhead_budget_pct=1e9)
        recorded.run._progress.health.deeper = 1
        return recorded

    return start


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))


def train(model, optimizer, steps=3):
    """One list of the norm of each parameter's gradient a step."""
    seen = []
    for _ in range(steps):
        model(torch.randn(64, 8)).square().mean().backward()
        seen.append([float(p.grad.norm()) for p in model.parameters() if p.grad is not None])
        optimizer.step()
        optimizer.zero_grad()
    return seen


def deep():
    """So many layers of one shape that their gradients are taken together."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(12)))


@pytest.mark.parametrize(("make", "first"), [(small, "0.weight"), (deep, "0.0.weight")])
def test_every_layer_has_its_norm_in_every_step(everything, make, first):
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    recorded = everything(model)
    seen = train(model, optimizer)
    for place, (name, _) in enumerate(model.named_parameters()):
        norms_of_layer = recorded.of(f"grad_norm/{name}")
        assert norms_of_layer == [(step, pytest.approx(row[place], rel=1e-6)) for step, row in enumerate(seen, start=1)]
    assert all(0 < ratio < 1 for _, ratio in recorded.of("update/ratio"))
    assert [step for step, _ in recorded.of(f"update_ratio/{first}")] == [1, 2, 3]
    assert [step for step, _ in recorded.of("dead/share")] == [2, 3], "the model is known after its first step"


def test_layers_are_known_before_clipping_too(everything):
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    recorded = everything(model)
    before = []
    for _ in range(3):
        (100 * model(torch.randn(4, 8)).square().mean()).backward()
        before.append(float(model[0].weight.grad.norm()))
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    assert recorded.of("grad_norm/0.weight") == [(step, pytest.approx(before[step - 1], rel=1e-6)) for step in (2, 3)]


def test_clipping_another_optimizers_gradients_says_nothing_of_ours(everything):
    generator, critic = small(), nn.Linear(8, 1)
    ours, other = torch.optim.SGD(generator.parameters(), lr=1e-2), torch.optim.SGD(critic.parameters(), lr=1e-2)
    recorded = everything(generator, ours)
    true = []
    for _ in range(2):
        (1000 * critic(torch.randn(4, 8)).square().mean()).backward()
        nn.utils.clip_grad_norm_(critic.parameters(), 1.0)
        other.step()
        generator(torch.randn(4, 8)).square().mean().backward()
        true.append(math.sqrt(sum(float(p.grad.square().sum()) for p in generator.parameters())))
        ours.step()
        ours.zero_grad()
        other.zero_grad()
    assert recorded.of("grad/norm") == [
        (step, pytest.approx(norm, rel=1e-6)) for step, norm in enumerate(true, start=1)
    ]


def test_shares_of_gradients_that_are_zero_or_vanish(everything):
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorded = everything(model)
    model(torch.randn(4, 8)).mean().backward()
    model.bias.grad.zero_()
    model.weight.grad.fill_(1e-8)
    optimizer.step()
    assert recorded.of("grad/zero_share") == [(1, 0.5)]
    assert recorded.of("grad/vanishing_share") == [(1, 0.5)]


def test_parameters_without_a_gradient_are_neither_zero_nor_named(everything):
    model = small()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorded = everything(model)
    train(model, optimizer, 1)
    assert recorded.of("grad/zero_share") == [(1, 0.0)]
    assert not recorded.of("grad_norm/0.weight")
    assert recorded.of("grad_norm/2.weight")


def test_a_gradient_without_numbers_is_neither_zero_nor_vanishing():
    parameters = [nn.Parameter(torch.zeros(size)) for size in (0, 4, 4, 4)]
    for parameter, number in zip(parameters, (0.0, 0.0, 4e-8, 1.0), strict=True):
        parameter.grad = torch.full_like(parameter, number)
    found = norms([p.grad for p in parameters], Plan.of(torch.optim.SGD(parameters, lr=0.1), None))
    third = pytest.approx(1 / 3)
    assert found.report().shares == {"grad/zero_share": third, "grad/vanishing_share": third}
    assert found.report(0.1).shares == {"grad/zero_share": third, "grad/vanishing_share": 0.0}, "they are 4e-7"


def test_parameters_of_one_layer_count_together():
    """More than 256 parameters: a row for each module, of those of its parameters that have a gradient."""
    model = nn.Sequential(*(nn.Linear(2, 1) for _ in range(150)))
    for number, layer in enumerate(model, start=1):
        layer.weight.grad, layer.bias.grad = torch.full((1, 2), float(number)), torch.full((1,), 2.0 * number)
    model[7].bias.grad = model[9].weight.grad = model[9].bias.grad = None
    report = norms(
        [p.grad for p in model.parameters()], Plan.of(torch.optim.SGD(model.parameters(), lr=0.1), model)
    ).report()
    squares = [6.0 * number**2 for number in range(1, 151)]
    squares[7] = 2.0 * 8**2
    assert report.square_sum == pytest.approx(sum(squares) - squares[9])
    assert report.layers.pop(9) is None
    assert report.layers == pytest.approx(squares[:9] + squares[10:])


def test_numbers_that_are_nan_or_inf_are_counted_by_parameter(everything):
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    recorded = everything(model)
    told = []
    recorded.run._progress.health.on_nonfinite = lambda step, names: told.append((step, names))
    for _ in range(2):
        model(torch.randn(4, 8)).square().mean().backward()
        model[2].weight.grad[0, :5] = float("nan")
        model[2].weight.grad[0, 5] = float("inf")
        optimizer.step()
        optimizer.zero_grad()
        nn.init.ones_(model[2].weight)
        until(
            lambda: recorded.rows.extend(recorded.sender.drain()) or not recorded.sender.rows,
            why="the row never became ready",
        )
    assert recorded.of("grad_nonfinite/2.weight") == [(2, 6.0)], (
        "which are bad is known a step later, and then they are counted"
    )
    assert told == [(1, ["2.weight"]), (2, ["2.weight"])]
    assert recorded.of("grad/nonfinite") == [(1, 1.0), (2, 1.0)]


def test_numbers_are_counted_at_once_when_the_loss_is_none(everything):
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    recorded = everything(model)
    (model(torch.randn(4, 8)).mean() * float("nan")).backward()
    optimizer.step()
    assert recorded.of("grad_nonfinite/2.weight") == [(1, 16.0)]


def test_gradients_that_a_fused_optimizer_unscales_are_told_unscaled(everything):
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, fused=True)
    recorded = everything(model)
    model(torch.randn(4, 8)).square().mean().backward()
    true = float(model[0].weight.grad.norm()) / 8
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(8.0), torch.tensor(0.0)  # as GradScaler leaves it to them
    optimizer.step()
    assert recorded.of("grad_norm/0.weight") == [(1, pytest.approx(true, rel=1e-6))]


def test_a_step_at_a_loss_scale_of_zero_is_told_with_what_the_optimizer_made_of_it(everything):
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**-149)  # half of it is no number of float32
    recorded = everything(model)
    for factor in (float("nan"), 1.0):
        scaler.scale(model(torch.randn(4, 8)).square().mean() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert all(parameter.isnan().all() for parameter in model.parameters())
    assert recorded.of("amp/scale") == [(1, 2.0**-149), (2, 0.0)]
    assert recorded.of("amp/skipped") == [(1, 1.0), (2, 1.0)]
    assert recorded.of("grad/nonfinite") == [(2, 4.0)]


def test_a_model_of_many_parameters_stays_below_the_limit_of_names(everything):
    model = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(700)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    recorded = everything(model)
    for _ in range(2):
        (model(torch.randn(4, 2)).mean() * float("nan")).backward()
        optimizer.step()
        optimizer.zero_grad()
    recorded.finish()
    names = {name for _, values in recorded.rows for name in values}
    assert len(names) < 700
    assert recorded.run._progress.health.deeper == 1


def test_a_plan_is_made_anew_for_other_parameters():
    model = small()
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
    plan = Plan.of(optimizer, model)
    assert plan.fits(list(model[2].parameters()))
    optimizer.add_param_group({"params": list(model[0].parameters())})
    assert not plan.fits([p for group in optimizer.param_groups for p in group["params"]])


def test_a_plan_is_made_anew_when_the_model_changes_its_type():
    """In half precision a norm above 65504 is Inf, so it is taken in single: the type of the norms follows the
    parameters'."""
    weight = nn.Parameter(torch.ones(4, dtype=torch.float64))
    plan = Plan([weight], ["weight"], None)
    layer = nn.Module()
    layer.weight = weight
    layer.half()
    assert layer.weight is weight
    assert not plan.fits([weight])
    norm, _ = result([torch.full((4,), 5e4, dtype=torch.float16)], Plan([weight], ["weight"], None))
    assert norm == pytest.approx(1e5, rel=1e-3)


def test_a_sparse_gradient_in_a_model_of_plain_parameters():
    model = nn.Sequential(nn.Embedding(10, 2, sparse=True), nn.Linear(2, 1))
    model(torch.tensor([3, 3])).sum().backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = Plan.of(optimizer, model)
    true = math.sqrt(sum(float(p.grad.to_dense().square().sum()) for p in model.parameters()))
    gradients = [p.grad for p in model.parameters()]
    for _ in range(2):
        assert result(gradients, plan) == (pytest.approx(true), 0)


def test_passes_of_several_ranks_fall_on_the_same_steps(record, monkeypatch):
    """Two ranks whose passes cost differently still have steps in common: periods are powers of two, counted from 0."""
    monkeypatch.setattr("perfagent.signals.gradient_schedule.telling_ns", lambda layers: 0.0)
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorded = record(model)
    p, health = recorded.run._progress, recorded.run._progress.health
    train(model, optimizer, 1)
    health._plan.world = 2
    due = []
    for cost_ns, completed in ((300_000, 5), (700_000, 7), (2_000_000, 100)):
        p.completed, health._cost_ns = completed, cost_ns
        health.finish(p, optimizer, 10_000_000)
        due.append(p.measure_at)
    assert due == [8, 16, 128]


def test_no_pass_becomes_part_of_a_cuda_graph(monkeypatch):
    """Its kernels would run again at each replay, with nobody to read what they find."""

    class Gradient:
        is_cuda = True

        def __getattr__(self, name):
            raise AssertionError(f"{name} of a gradient was asked for while its stream was captured")

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert norms([None, Gradient()]) is None


def test_a_device_without_room_for_a_pass_costs_that_pass_only(record, monkeypatch):
    """The allocation fails in the hook that counts the steps: it was turned off, and with it all that a run shows."""
    asked = []

    def full(*_arguments, **_options):
        asked.append(state.current.completed)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")

    monkeypatch.setattr(torch, "_foreach_norm", full)
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorded = record(model)
    for _ in range(4):
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
    assert not guard.failures
    state.current.health.come_back(state.current)
    assert state.current.measure_at >= 1000
    assert asked == [0], "each failure makes torch give back what it holds in reserve"
    assert [number for number, _ in recorded.steps()] == [1, 2, 3, 4]


def test_nothing_is_read_back_on_the_training_thread():
    """What reads a tensor's value waits for the device on a GPU: none of it may happen in a pass, a comparison or a
    look."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from perfagent.signals.dead_units import DeadUnits
    from perfagent.signals.updates import Weights

    class Count(TorchDispatchMode):
        operations: ClassVar[list[str]] = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.operations.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    model = small()
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parameters = list(model.parameters())
    probe = DeadUnits(model, lambda _: None)
    with Count() as mode:
        found = norms([p.grad for p in parameters], plan := Plan.of(optimizer, model))
        launched = [name for name in mode.operations if name != "detach"]
        assert launched == ["_foreach_norm", "stack"], "two launches, whatever the number of parameters"
        found.count_numbers([p.grad for p in parameters], [0, 2])
        Weights(parameters, plan, 40).compare(parameters)
        if probe:  # not where an earlier test has compiled something
            probe.call(model, (torch.randn(4, 8),), {})
    reads = {"_local_scalar_dense", "nonzero", "item", "equal", "is_nonzero"}
    assert not reads & set(mode.operations)
