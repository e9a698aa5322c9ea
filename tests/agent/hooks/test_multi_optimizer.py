"""Several optimizers on one backward pass: the norm of a step is that of all gradients that they take, however they
take them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from truth import norm_of

BIG, SMALL, THIRD = "big", "small", "third"


def told(recorded) -> dict[int, float]:
    return dict(recorded.of("grad/norm"))


def exactly(true: list[float], first: int = 1) -> dict[int, float]:
    return {step: pytest.approx(norm, rel=1e-5) for step, norm in enumerate(true, 1) if step >= first}


def three_parts() -> tuple[nn.Module, dict[str, torch.optim.Optimizer]]:
    """Matrices, biases and a scale, each with an optimizer of its own; each part has gradients that count."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4), nn.LayerNorm(4))
    matrices = [model[0].weight, model[2].weight]
    biases = [model[0].bias, model[2].bias]
    return model, {
        BIG: torch.optim.SGD(matrices, lr=1e-3),
        SMALL: torch.optim.AdamW(biases, lr=1e-3),
        THIRD: torch.optim.Adam(model[3].parameters(), lr=1e-3),
    }


def backward(model, scale=30.0) -> None:
    (scale * (model(torch.randn(4, 8)) - torch.randn(4, 4)).square().mean()).backward()


@pytest.mark.parametrize("order", [(BIG, SMALL, THIRD), (SMALL, BIG, THIRD), (SMALL, THIRD, BIG)])
@pytest.mark.parametrize("clears", ["each", "all"])
@pytest.mark.parametrize("named", [True, False])
def test_the_norm_is_of_all_that_step_in_whatever_order(every_step, order, clears, named):
    model, optimizers = three_parts()
    recorded = every_step(model if named else None)
    true = []
    for _ in range(4):
        backward(model)
        true.append(norm_of(model.parameters()))
        for name in order:
            optimizers[name].step()
            if clears == "each":
                optimizers[name].zero_grad()
        model.zero_grad()
    assert told(recorded) == exactly(true)


def test_layers_and_bad_parameters_are_those_of_all(every_step):
    model, optimizers = three_parts()
    recorded = every_step(model)
    bad = []
    recorded.run._progress.health.on_nonfinite = lambda step, names: bad.append((step, names))
    for step in range(4):
        backward(model)
        true = {name: norm_of([p]) for name, p in model.named_parameters()}
        if step == 3:
            model[3].bias.grad[1] = float("nan")
        for optimizer in optimizers.values():
            optimizer.step()
        model.zero_grad()
    assert dict(recorded.of("grad/nonfinite")) == {1: 0.0, 2: 0.0, 3: 0.0, 4: 1.0}
    assert bad == [(4, ["3.bias"])]
    for name, norm in true.items():
        series = dict(recorded.of(f"grad_norm/{name}"))
        assert set(series) == {1, 2, 3, 4}, name
        assert math.isnan(series[4]) if name == "3.bias" else series[4] == pytest.approx(norm, rel=1e-5), name
    assert math.isnan(told(recorded)[4])


@pytest.mark.parametrize("order", [(BIG, SMALL, THIRD), (SMALL, THIRD, BIG)])
@pytest.mark.parametrize("fused", [False, True])
def test_with_a_scaler_that_unscales_for_one_at_a_time(every_step, order, fused):
    model, optimizers = three_parts()
    if fused:
        optimizers[SMALL] = torch.optim.AdamW(optimizers[SMALL].param_groups[0]["params"], lr=1e-3, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    recorded = every_step(model)
    true = []
    for _ in range(4):
        loss = 3 * (model(torch.randn(4, 8)) - torch.randn(4, 4)).square().mean()
        scaler.scale(loss).backward()
        true.append(norm_of(model.parameters()) / 1024.0)
        for name in order:
            scaler.step(optimizers[name])
            optimizers[name].zero_grad()
        scaler.update()
    assert told(recorded) == exactly(true)


@pytest.mark.parametrize("order", [(BIG, SMALL, THIRD), (SMALL, THIRD, BIG)])
@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("overflows", [BIG, SMALL])
def test_what_a_scaler_skips_is_no_bad_gradient(every_step, order, unscales, fused, overflows):
    """A fused optimizer is called, and skips on its device. Of what the others took alone no norm is told."""
    model, optimizers = three_parts()
    if fused:
        for name in (BIG, SMALL):
            optimizers[name] = torch.optim.AdamW(optimizers[name].param_groups[0]["params"], lr=1e-3, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    recorded = every_step(model)
    bad: list[list[str]] = []
    recorded.run._progress.health.on_nonfinite = lambda _, names: bad.append(names)
    true = {}
    for step in (1, 2, 3, 4):
        scaler.scale(3 * model(torch.randn(4, 8)).square().mean()).backward()
        true[step] = norm_of(model.parameters()) / scaler.get_scale()
        if step == 2:
            optimizers[overflows].param_groups[0]["params"][0].grad[0] = math.inf
            del true[step]
        for name in order:
            if unscales:
                scaler.unscale_(optimizers[name])
            scaler.step(optimizers[name])
        scaler.update()
        model.zero_grad()
    assert told(recorded) == {step: pytest.approx(norm, rel=1e-5) for step, norm in true.items()}
    assert not any(count for _, count in recorded.of("grad/nonfinite"))
    assert not bad
    assert dict(recorded.of("amp/skipped"))[4] == (overflows == BIG)


@pytest.mark.parametrize("order", [(BIG, SMALL, THIRD), (SMALL, THIRD, BIG)])
@pytest.mark.parametrize("watched", ["every_step", "seldom"])
@pytest.mark.parametrize("clips", ["together", "one by one", "as each steps"])
def test_clipping_says_the_norm_of_all(request, order, watched, clips):
    model, optimizers = three_parts()
    recorded = request.getfixturevalue(watched)(model, optimizers[BIG])
    true, last = [], {}
    for _ in range(4):
        backward(model)
        true.append(norm_of(model.parameters()))
        last = {name: norm_of([p]) for name, p in model.named_parameters()}
        if clips == "together":
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if clips == "one by one":
            for name in order:
                nn.utils.clip_grad_norm_(optimizers[name].param_groups[0]["params"], 0.1)
        for name in order:
            if clips == "as each steps":
                nn.utils.clip_grad_norm_(optimizers[name].param_groups[0]["params"], 0.1)
            optimizers[name].step()
            optimizers[name].zero_grad()
    # until it is known who steps, the primary one ends its step without those whose clipping comes after it
    assert told(recorded) == exactly(true)
    if watched == "every_step":
        for name, norm in last.items():
            assert dict(recorded.of(f"grad_norm/{name}"))[4] == pytest.approx(norm, rel=1e-5), (name, clips)


@pytest.mark.parametrize("order", [(BIG, SMALL), (SMALL, BIG)])
def test_clipping_of_one_leaves_no_norm_but_a_measured_one(request, order):
    """AdamW's gradients are clipped, Muon's need no clipping."""
    for watched in ("every_step", "seldom"):
        model, optimizers = three_parts()
        model[3].requires_grad_(requires_grad=False)
        recorded = request.getfixturevalue(watched)(model, optimizers[BIG])
        true = []
        for _ in range(4):
            backward(model)
            true.append(norm_of(model.parameters()))
            nn.utils.clip_grad_norm_(optimizers[SMALL].param_groups[0]["params"], 0.01)
            for name in order:
                optimizers[name].step()
            model.zero_grad()
        # in the first step nobody knows yet that the one that was clipped belongs to it
        expected = exactly(true, first=2) if watched == "every_step" else {}
        assert told(recorded) == expected


def test_a_critic_with_a_pass_of_its_own_is_not_in_it(every_step):
    torch.manual_seed(0)
    generator, critic = nn.Linear(8, 64), nn.Linear(64, 1)
    make, judge = torch.optim.Adam(generator.parameters()), torch.optim.Adam(critic.parameters())
    recorded = every_step()
    true = []
    for _ in range(4):
        for _ in range(2):
            judge.zero_grad()
            critic(generator(torch.randn(4, 8)).detach()).square().mean().backward()
            judge.step()
        make.zero_grad()
        critic(generator(torch.randn(4, 8))).mean().backward()
        true.append(norm_of(generator.parameters()))
        make.step()
    assert told(recorded) == exactly(true)


def test_a_critic_that_steps_after_the_generator_is_not_in_it(every_step):
    torch.manual_seed(0)
    generator, critic = nn.Linear(8, 64), nn.Linear(64, 1)
    make, judge = torch.optim.Adam(generator.parameters()), torch.optim.Adam(critic.parameters())
    recorded = every_step()
    true = []
    for _ in range(4):
        make.zero_grad()
        critic(generator(torch.randn(4, 8))).mean().backward()
        true.append(norm_of(generator.parameters()))
        make.step()
        judge.zero_grad()
        critic(generator(torch.randn(4, 8)).detach()).square().mean().backward()
        judge.step()
    assert told(recorded) == exactly(true)


def test_optimizers_that_step_inside_of_the_backward_pass(every_step):
    """One for each parameter, which saves the memory of the gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    squares: list[float] = []
    optimizers = {parameter: torch.optim.AdamW([parameter], lr=1e-3) for parameter in model.parameters()}

    def step_now(parameter) -> None:
        squares.append(float(parameter.grad.double().square().sum()))
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    handles = [parameter.register_post_accumulate_grad_hook(step_now) for parameter in model.parameters()]
    recorded = every_step(model)
    true = []
    for _ in range(4):
        squares.clear()
        backward(model)
        true.append(math.sqrt(sum(squares)))
    for handle in handles:  # torch holds them where the garbage collector cannot look
        handle.remove()
    assert told(recorded) == exactly(true)


def test_of_too_many_optimizers_to_measure_no_share_is_told(every_step):
    """One for each parameter, stepping inside of the backward pass: the gradient of the first one alone was all of
    them."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(50)), nn.Linear(4, 1))
    with torch.no_grad():
        model[-1].weight.zero_()  # so that nothing reaches the others
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.0) for parameter in model.parameters()}
    handles = [p.register_post_accumulate_grad_hook(lambda p: optimizers[p].step()) for p in model.parameters()]
    recorded = every_step(model)
    for _ in range(4):
        model(torch.ones(2, 4)).square().mean().backward()
    for handle in handles:  # torch holds them where the garbage collector cannot look
        handle.remove()
    assert not recorded.of("grad/zero_share"), "of one parameter, it was told as that of all"
    assert not recorded.of("grad/vanishing_share")
    assert not told(recorded)


def test_what_the_others_cost_is_counted(every_step):
    model, optimizers = three_parts()
    recorded = every_step(model)
    p = recorded.run._progress
    backward(model)
    optimizers[SMALL].step()
    before = p.pass_ns
    assert before > 0
    optimizers[BIG].step()
    assert p.pass_ns > before


def test_several_optimizers_train_to_the_same_bits(every_step):
    def trained(watched: bool) -> list[torch.Tensor]:
        model, optimizers = three_parts()
        recorded = every_step(model) if watched else None
        torch.manual_seed(1)
        for _ in range(4):
            backward(model)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers.values():
                optimizer.step()
                optimizer.zero_grad()
        if recorded is not None:
            recorded.finish()
        return [parameter.detach().clone() for parameter in model.parameters()]

    without = trained(False)
    assert all(torch.equal(one, other) for one, other in zip(without, trained(True), strict=True))


@pytest.mark.parametrize("order", [(BIG, SMALL, THIRD), (SMALL, THIRD, BIG)])
def test_closures_that_do_nothing(every_step, order):
    """Lightning's manual optimization gives them to every optimizer."""
    model, optimizers = three_parts()
    recorded = every_step(model)
    true = []
    for _ in range(4):
        backward(model)
        true.append(norm_of(model.parameters()))
        for name in order:
            optimizers[name].step(closure=lambda: None)
            optimizers[name].zero_grad()
    assert told(recorded) == exactly(true)


def test_optimizers_with_closures_that_train_have_passes_of_their_own(every_step):
    torch.manual_seed(0)
    body, head = nn.Linear(8, 64), nn.Linear(8, 4)
    optimizers = [torch.optim.SGD(part.parameters(), lr=1e-3) for part in (body, head)]
    recorded = every_step()
    true = []
    for _ in range(4):
        norms = []
        for part, optimizer in zip((body, head), optimizers, strict=True):

            def closure(part=part, optimizer=optimizer, norms=norms):
                optimizer.zero_grad()
                loss = part(torch.randn(4, 8)).square().mean()
                loss.backward()
                norms.append(norm_of(part.parameters()))
                return loss

            optimizer.step(closure)
        true.append(norms[0])
    assert told(recorded) == exactly(true)


def test_the_first_step_is_not_read_before_the_others_have_stepped(every_step, monkeypatch):
    """After the first step of the primary optimizer its model is looked for, which takes longer than a row waits."""
    model, optimizers = three_parts()
    recorded = every_step(model)
    p = recorded.run._progress
    monkeypatch.setattr("perfagent.step.row._SETTLE_S", 0.0)
    look = p.on_first_step

    def long_look(optimizer):
        look(optimizer)
        recorded.rows += recorded.sender.drain()  # as the sender's thread does meanwhile

    p.on_first_step = long_look
    backward(model)
    true = norm_of(model.parameters())
    for optimizer in optimizers.values():
        optimizer.step()
    assert told(recorded) == exactly([true])


def test_a_row_does_not_wait_for_time_alone_while_an_optimizer_steps(every_step, monkeypatch):
    """The next one's gradients are yet to come. A step of Muon may take longer than a row waits."""
    model, optimizers = three_parts()
    recorded = every_step(model)
    monkeypatch.setattr("perfagent.step.row._SETTLE_S", 0.0)

    def meanwhile(*_) -> None:
        recorded.rows += recorded.sender.drain()  # as the sender's thread does

    optimizers[SMALL].register_step_post_hook(meanwhile)
    true = []
    for _ in range(3):
        backward(model)
        true.append(norm_of(model.parameters()))
        for optimizer in optimizers.values():
            optimizer.step()
        model.zero_grad()
    assert told(recorded) == exactly(true)


def test_what_comes_too_late_is_left_out(every_step, monkeypatch):
    """The row was looked at, and is read as it was: what came since may still be on its way from a device."""
    model, optimizers = three_parts()
    recorded = every_step(model)
    monkeypatch.setattr("perfagent.step.row._SETTLE_S", 0.0)
    backward(model)
    true = norm_of(optimizers[BIG].param_groups[0]["params"])
    optimizers[BIG].step()
    row = recorded.run._progress.last
    assert row.ready(recorded.run._progress)
    optimizers[SMALL].step()
    assert row.note(recorded.run._progress).rare["grad/norm"] == pytest.approx(true, rel=1e-5)
    recorded.sender.rows.clear()


def test_while_what_the_primary_one_trains_is_frozen_others_are_not_measured_in_every_step(every_step, monkeypatch):
    """Nobody would ask for it, and nothing would count what it costs."""
    from perfagent.signals.gradient_schedule import Health

    model, optimizers = three_parts()
    recorded = every_step(model)
    passes: list[object] = []
    measure_other = Health.measure_other

    def counted(self, p, optimizer):
        passes.append(optimizer)
        return measure_other(self, p, optimizer)

    monkeypatch.setattr(Health, "measure_other", counted)
    big, small = (optimizers[name].param_groups[0]["params"] for name in (BIG, SMALL))
    true = {}
    for step in range(1, 21):
        frozen = 2 < step <= 18
        for parameter in big:
            parameter.requires_grad_(not frozen)
        backward(model)
        if not frozen:
            true[step] = pytest.approx(norm_of([*big, *small]), rel=1e-5)
        for name in (SMALL, BIG):
            optimizers[name].step()
        model.zero_grad()
    assert told(recorded) == true
    assert len(passes) == len(true) + 1  # the first frozen step was not to be foreseen


def test_optimizers_that_are_dropped_are_let_go_of(every_step):
    """Whoever gets the id of one with a backward pass of its own need not have one."""
    model, optimizers = three_parts()
    recorded = every_step(model)
    together = recorded.run._progress.together
    for own_pass in (True, False):
        beside = torch.optim.SGD(model[3].parameters(), lr=1e-3)
        for _ in range(2):
            backward(model)
            beside.step()
            if own_pass:
                backward(model)
            optimizers[BIG].step()
            model.zero_grad()
        assert list((together._apart if own_pass else together._members).values()) == [beside]
        del beside
        assert not together._apart
        assert not together._members


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0], [1, 0, 3, 2]])
def test_optimizers_that_are_made_when_they_first_step_make_one_step(every_step, order):
    """Stochastic variational inference: each parameter has its optimizer; a larger one that comes makes no step of its
    own."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 3))
    parameters, optimizers, truth = [*model.parameters()], {}, []
    recorded = every_step()
    for _ in range(5):
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        truth.append((loss.item(), pytest.approx(norm_of(parameters), rel=1e-5)))
        for place in order:
            if place not in optimizers:
                optimizers[place] = torch.optim.Adam([parameters[place]], lr=0.01)
            optimizers[place].step()
        model.zero_grad()
    assert [step for step, _ in recorded.steps()] == [1, 2, 3, 4, 5]
    assert [(values["loss"], values["grad/norm"]) for _, values in recorded.steps()] == truth
