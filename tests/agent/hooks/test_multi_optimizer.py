"""Several optimizers on one backward pass: the norm of a step is that of all gradients that they take, however they
take them."""

from __future__ import annotations

import math

import pytest
import torch
from agent.hooks.loops import numbered
from torch import nn
from truth import norm_of

BIG, SMALL, THIRD = "big", "small", "third"
FIRST, LAST = (BIG, SMALL, THIRD), (SMALL, THIRD, BIG)
by_order = pytest.mark.parametrize("order", [FIRST, LAST], ids=["big first", "big last"])


def three_parts() -> tuple[nn.Module, dict[str, torch.optim.Optimizer]]:
    """Matrices, biases and a scale, each with an optimizer of its own; each part has gradients that count."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4), nn.LayerNorm(4))
    return model, {
        BIG: torch.optim.SGD([model[0].weight, model[2].weight], lr=1e-3),
        SMALL: torch.optim.AdamW([model[0].bias, model[2].bias], lr=1e-3),
        THIRD: torch.optim.Adam(model[3].parameters(), lr=1e-3),
    }


def own(optimizer) -> list[nn.Parameter]:
    return optimizer.param_groups[0]["params"]


def loss_of(model, scale=30.0) -> torch.Tensor:
    return scale * (model(torch.randn(4, 8)) - torch.randn(4, 4)).square().mean()


def backward(model) -> float:
    """Answers the norm of all."""
    loss_of(model).backward()
    return norm_of(model.parameters())


def clip(optimizer, limit=0.1) -> None:
    nn.utils.clip_grad_norm_(own(optimizer), limit)


def norms(recorded) -> dict[int, float]:
    return recorded.series("grad/norm")


@pytest.mark.parametrize("order", [FIRST, (SMALL, BIG, THIRD), LAST], ids=["first", "between", "last"])
@pytest.mark.parametrize(("clears", "named"), [("each", True), ("all", False), ("closures", True)])
def test_the_norm_is_of_all_that_step_in_whatever_order(every_step, order, clears, named):
    """closures: Lightning's manual optimization gives one that does nothing to every optimizer."""
    model, optimizers = three_parts()
    recorded, true = every_step(model if named else None), []
    for _ in range(4):
        true.append(backward(model))
        for name in order:
            optimizers[name].step(*[lambda: None] * (clears == "closures"))
            if clears != "all":
                optimizers[name].zero_grad()
        model.zero_grad()
    assert norms(recorded) == numbered(true)


def test_layers_and_bad_parameters_are_those_of_all(every_step):
    model, optimizers = three_parts()
    recorded, bad = every_step(model), []
    recorded.sender.reader.gradients.on_nonfinite = lambda step, names: bad.append((step, names))
    for step in range(4):
        backward(model)
        true = {name: norm_of([p]) for name, p in model.named_parameters()}
        if step == 3:
            model[3].bias.grad[1] = float("nan")
        for optimizer in optimizers.values():
            optimizer.step()
        model.zero_grad()
    assert recorded.series("grad/nonfinite") == {1: 0.0, 2: 0.0, 3: 0.0, 4: 1.0}
    assert bad == [(4, ["3.bias"])]
    for name, norm in true.items():
        series = recorded.series(f"grad_norm/{name}")
        assert set(series) == {1, 2, 3, 4}, name
        assert math.isnan(series[4]) if name == "3.bias" else series[4] == pytest.approx(norm, rel=1e-5), name
    assert math.isnan(norms(recorded)[4])


@by_order
@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("overflows", [None, BIG, SMALL])
def test_what_a_scaler_skips_is_no_bad_gradient(every_step, order, unscales, fused, overflows):
    """A scaler unscales for one at a time. A fused optimizer is called, and skips on its device. Of what the others
    took alone no norm is told."""
    model, optimizers = three_parts()
    if fused:
        for name in (BIG, SMALL):
            optimizers[name] = torch.optim.AdamW(own(optimizers[name]), lr=1e-3, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    recorded, bad, true = every_step(model), [], {}
    recorded.sender.reader.gradients.on_nonfinite = lambda _, names: bad.append(names)
    for step in (1, 2, 3, 4):
        scaler.scale(loss_of(model, 3.0)).backward()
        true[step] = pytest.approx(norm_of(model.parameters()) / scaler.get_scale(), rel=1e-5)
        if step == 2 and overflows:
            own(optimizers[overflows])[0].grad[0] = math.inf
            del true[step]
        for name in order:
            if unscales:
                scaler.unscale_(optimizers[name])
            scaler.step(optimizers[name])
        scaler.update()
        model.zero_grad()
    assert norms(recorded) == true
    assert not any(count for _, count in recorded.of("grad/nonfinite"))
    assert not bad
    assert recorded.series("amp/skipped")[4] == (overflows == BIG)


@by_order
@pytest.mark.parametrize("watched", ["every_step", "seldom"])
@pytest.mark.parametrize("clips", ["together", "one by one", "as each steps"])
def test_clipping_says_the_norm_of_all(request, order, watched, clips):
    model, optimizers = three_parts()
    recorded, true = request.getfixturevalue(watched)(model, optimizers[BIG]), []
    for _ in range(4):
        true.append(backward(model))
        last = {name: norm_of([p]) for name, p in model.named_parameters()}
        if clips == "together":
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        for name in order if clips == "one by one" else ():
            clip(optimizers[name])
        for name in order:
            if clips == "as each steps":
                clip(optimizers[name])
            optimizers[name].step()
            optimizers[name].zero_grad()
    assert norms(recorded) == numbered(true)
    if watched == "every_step":
        for name, norm in last.items():
            assert recorded.series(f"grad_norm/{name}")[4] == pytest.approx(norm, rel=1e-5), (name, clips)


# ---- one for each parameter


def test_optimizers_that_step_inside_of_the_backward_pass(every_step):
    """Which saves the memory of the gradients."""
    model, _ = three_parts()
    squares: list[float] = []
    optimizers = {parameter: torch.optim.AdamW([parameter], lr=1e-3) for parameter in model.parameters()}

    def step_now(parameter) -> None:
        squares.append(float(parameter.grad.double().square().sum()))
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    handles = [parameter.register_post_accumulate_grad_hook(step_now) for parameter in model.parameters()]
    recorded, true = every_step(model), []
    for _ in range(4):
        squares.clear()
        backward(model)
        true.append(math.sqrt(sum(squares)))
    for handle in handles:  # torch holds them where the garbage collector cannot look
        handle.remove()
    assert norms(recorded) == numbered(true)
