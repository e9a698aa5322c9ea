"""How far a step moves the weights where several optimizers share it: the ratio is that of all that they move
together."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

BIG, SMALL, THIRD = "big", "small", "third"


@pytest.fixture
def every_step(record):
    """every_step(model=None): a run that compares the weights before and after every step."""

    def start(model=None):
        recorded = record(model, overhead_budget_pct=1e9)
        recorded.run._progress.health.deeper = 1
        return recorded

    return start


def three_parts() -> tuple[nn.Module, dict[str, torch.optim.Optimizer]]:
    """Matrices, biases and a scale, each with an optimizer of its own, that move them at very different speeds."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4), nn.LayerNorm(4))
    return model, {
        BIG: torch.optim.SGD([model[0].weight, model[2].weight], lr=1e-3),
        SMALL: torch.optim.AdamW([model[0].bias, model[2].bias], lr=1e-2),
        THIRD: torch.optim.Adam(model[3].parameters(), lr=1e-1),
    }


def moved(model, before) -> tuple[float, dict[str, float]]:
    """The true ratio of all weights, and of each that is not zero before."""
    changes = {name: float((p.detach() - before[name]).double().norm()) for name, p in model.named_parameters()}
    weights = {name: float(one.double().norm()) for name, one in before.items()}
    each = {name: changes[name] / weight for name, weight in weights.items() if weight}
    return math.hypot(*changes.values()) / math.hypot(*weights.values()), each


def kept(model) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def backward(model) -> None:
    (30 * (model(torch.randn(4, 8)) - torch.randn(4, 4)).square().mean()).backward()


@pytest.mark.parametrize("order", [(BIG, SMALL, THIRD), (SMALL, BIG, THIRD), (SMALL, THIRD, BIG)])
@pytest.mark.parametrize("clips", [False, True])
def test_the_ratio_is_of_all_that_step_in_whatever_order(every_step, order, clips):
    model, optimizers = three_parts()
    recorded = every_step(model)
    true = []
    for _ in range(4):
        backward(model)
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 1e3)
        before = kept(model)
        for name in order:
            optimizers[name].step()
            optimizers[name].zero_grad()
        true.append(moved(model, before))
    told = {n: pytest.approx(total, rel=1e-5) for n, (total, _) in enumerate(true, 1)}
    if clips:
        del told[1]  # its gradients were clipped before any optimizer was known
    assert dict(recorded.of("update/ratio")) == told
    for name, ratio in true[-1][1].items():
        assert dict(recorded.of(f"update_ratio/{name}"))[4] == pytest.approx(ratio, rel=1e-5), name


def test_without_the_part_of_one_no_ratio_of_all_is_told(every_step):
    """The scaler does not let one of them step: of what the other moved alone the layers are told."""
    model, optimizers = three_parts()
    del optimizers[THIRD]
    model[3].requires_grad_(requires_grad=False)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    recorded = every_step(model)
    for step in (1, 2, 3):
        scaler.scale(model(torch.randn(4, 8)).square().mean()).backward()
        if step == 2:
            model[0].bias.grad[0] = math.inf
        for name in (BIG, SMALL):
            scaler.step(optimizers[name])
        scaler.update()
        model.zero_grad()
    assert [step for step, _ in recorded.of("update/ratio")] == [1, 3]
    assert [step for step, _ in recorded.of("update_ratio/0.weight")] == [1, 2, 3]
    assert [step for step, _ in recorded.of("update_ratio/0.bias")] == [1, 3]


def test_a_critic_with_a_pass_of_its_own_is_not_in_it(every_step):
    torch.manual_seed(0)
    generator, critic = nn.Linear(8, 64), nn.Linear(64, 1)
    make, judge = torch.optim.Adam(generator.parameters(), lr=1e-3), torch.optim.Adam(critic.parameters(), lr=0.5)
    recorded = every_step()
    true = []
    for _ in range(4):
        judge.zero_grad()
        critic(generator(torch.randn(4, 8)).detach()).square().mean().backward()
        judge.step()
        make.zero_grad()
        critic(generator(torch.randn(4, 8))).mean().backward()
        before = kept(generator)
        make.step()
        true.append(moved(generator, before)[0])
    assert dict(recorded.of("update/ratio")) == {n: pytest.approx(ratio, rel=1e-5) for n, ratio in enumerate(true, 1)}


def test_optimizers_that_step_inside_of_the_backward_pass(every_step):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizers = {p: torch.optim.AdamW([p], lr=10.0 ** -(1 + place)) for place, p in enumerate(model.parameters())}

    def step_now(parameter) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    handles = [parameter.register_post_accumulate_grad_hook(step_now) for parameter in model.parameters()]
    recorded = every_step(model)
    true = []
    for _ in range(4):
        before = kept(model)
        backward(model)
        true.append(moved(model, before)[0])
    for handle in handles:  # torch holds them where the garbage collector cannot look
        handle.remove()
    assert dict(recorded.of("update/ratio")) == {n: pytest.approx(ratio, rel=1e-5) for n, ratio in enumerate(true, 1)}


def test_one_that_raises_in_its_step_leaves_nothing_that_another_is_compared_with(every_step):
    model, optimizers = three_parts()
    recorded = every_step(model)
    careful = copy.copy(optimizers[THIRD].param_groups[0]["betas"])
    for step in (1, 2, 3):
        backward(model)
        before = kept(model)
        optimizers[BIG].step()
        if step == 2:
            optimizers[THIRD].param_groups[0]["betas"] = None
            with pytest.raises(TypeError):
                optimizers[THIRD].step()
            optimizers[THIRD].param_groups[0]["betas"] = careful
        else:
            optimizers[THIRD].step()
        optimizers[SMALL].step()
        model.zero_grad()
        ratio = moved(model, before)[0]
    told = dict(recorded.of("update/ratio"))
    assert set(told) == {1, 3}
    assert told[3] == pytest.approx(ratio, rel=1e-5)
