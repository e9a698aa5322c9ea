"""The loss without user code: what a script would print, to the last bit."""

from __future__ import annotations

import math

import pytest
import torch
from agent.hooks.loops import sgd, step
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from perfagent.step.row import StepRow

by_loader = pytest.mark.parametrize("loader", [True, False], ids=["DataLoader", "own batching"])


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def cross_entropy(model, x):
    return functional.cross_entropy(model(x), torch.arange(len(x)) % 4)


def batches(loader, *shape):
    rows = torch.randn(*shape)
    return iter(DataLoader(rows, batch_size=None)) if loader else iter(rows)


def losses_of(recorded):
    return [loss for _, loss in recorded.of("loss")]


@by_loader
@pytest.mark.parametrize("divide", [True, False])
@pytest.mark.parametrize("windows", [[4, 4, 4], [4, 4, 1, 4, 4, 1, 4], [4, 4, 2]], ids=str)
def test_accumulated_losses_are_averaged_divided_or_not(record, model, windows, divide, loader):
    recorded, optimizer = record(model), sgd(model)
    source, means = batches(loader, sum(windows), 6, 8), []
    for window in windows:
        losses = []
        for _ in range(window):
            loss = cross_entropy(model, next(source))
            losses.append(loss.item())
            (loss / window if divide else loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        means.append(math.fsum(losses) / window)
    # the script's own division rounds each part to float32
    assert losses_of(recorded) == pytest.approx(means, rel=1e-6 if divide else 1e-15)


def test_several_losses_of_one_batch_add_up(record, model):
    recorded, optimizer, expected = record(model), sgd(model), []
    for x in batches(True, 2, 6, 8):
        out = model(x)
        first, second = out.square().mean(), out.abs().mean()
        first.backward(retain_graph=True)
        second.backward()
        expected.append(first.item() + second.item())
        optimizer.step()
        optimizer.zero_grad()
    first, second = model(torch.randn(2, 8)).square().mean(), model(torch.randn(2, 8)).abs().mean()
    torch.autograd.backward([first, second])
    optimizer.step()
    assert losses_of(recorded) == [*expected, first.item() + second.item()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_the_value_is_exactly_what_item_gives(record, dtype):
    weight = nn.Parameter(torch.tensor([1.2345678, 2.0], dtype=dtype))
    optimizer, recorded, printed = torch.optim.SGD([weight], lr=0.1), record(), []
    for _ in range(3):
        loss = (weight * weight).sum()
        loss.backward()
        optimizer.step()
        printed.append(loss.item())
    assert losses_of(recorded) == printed


# ---- passes that are none of the step's


def test_a_pass_that_the_loop_discards_is_none_of_the_step(record, model):
    optimizer = sgd(model)
    recorded, printed = record(model, optimizer=optimizer), []
    for number, x in enumerate(batches(True, 8, 6, 8)):
        loss = cross_entropy(model, x)
        loss.backward()
        if number % 4 != 2:
            optimizer.step()
            printed.append(loss.item())
        optimizer.zero_grad()
    assert losses_of(recorded) == printed


@pytest.mark.parametrize(("evaluates", "clears"), [(False, "before the epoch"), (True, "with its first batch")])
def test_a_window_cut_short_by_the_epochs_end_is_none(record, model, clears, evaluates):
    optimizer = sgd(model)
    recorded = record(model, optimizer=optimizer)
    data, printed = torch.randn(5, 6, 8), []
    for _ in range(3):
        window = []
        if clears == "before the epoch":
            optimizer.zero_grad()
        for number, x in enumerate(DataLoader(data, batch_size=None)):
            if number % 2 == 0 and clears != "before the epoch":
                optimizer.zero_grad()
            loss = cross_entropy(model, x) / 2
            loss.backward()
            window.append(loss.item())
            if number % 2:
                printed.append(sum(window))
                window = []
                optimizer.step()
                optimizer.zero_grad()
        if evaluates:
            with torch.no_grad():
                for x in DataLoader(data, batch_size=None):
                    model.eval()(x)
            model.train()
    assert losses_of(recorded) == pytest.approx(printed, rel=1e-6)


def test_a_loss_beyond_half_precision_when_scaled_is_itself(record):
    weight = nn.Parameter(torch.tensor([3.0], dtype=torch.float16))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    recorded = record()
    scaled = torch.amp.GradScaler("cpu", init_scale=65536.0).scale(weight.sum(dim=0, keepdim=True))
    assert not scaled.isfinite()
    scaled.backward()
    optimizer.step()
    assert recorded.of("loss") == [(1, 3.0)]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_loss_is_told_at_once_with_its_gradients(record, model, bad):
    recorded, optimizer = record(model), sgd(model)

    def steps(*factors):
        for factor in factors:
            step(optimizer, cross_entropy(model, torch.randn(6, 8)) * factor)
            for parameter in model.parameters():  # what the bad step did to them
                parameter.data.nan_to_num_(0.1, 0.1, 0.1)

    steps(bad)
    ((number, values),) = [row for row in recorded.sender.drain() if "lr" in row[1]]
    assert (number, repr(values["loss"]), values["grad/nonfinite"]) == (1, repr(bad), 4)
    assert not math.isfinite(values["grad/norm"])
    recorded.progress.measure_at = 2**60
    steps(1.0, 1.0)
    recorded.rows += recorded.sender.drain()
    steps(bad)
    usual = [row.rare is None for row in recorded.sender.rows if isinstance(row, StepRow)]
    assert usual[-2:] == [True, False], "what is usual is passed on by the block"


# ---- the user's own loss


@pytest.mark.parametrize("every", [1, 2])
def test_a_loss_that_is_logged_stands_alone_at_its_step(record, model, every):
    recorded, optimizer, printed = record(model), sgd(model), []
    for number in range(1, 7):
        loss = cross_entropy(model, torch.randn(6, 8))
        step(optimizer, loss)
        if number % every == 0:
            recorded.run.log({"loss": loss if every == 2 else loss.item()})
        printed.append(loss.item())
    assert recorded.of("loss") == list(enumerate(printed, start=1))


# ---- means over what a mask leaves


def train_masked(model, counts, loss_of, *, loader=False):
    """counts: of each window how many items of each micro-batch its mask leaves; answers of each window the losses as
    the script has them."""
    optimizer = sgd(model, lr=0.01)
    masks = [[torch.arange(12) < count for count in window] for window in counts]
    flat = [mask for window in masks for mask in window]
    rows = list(zip(torch.randn(len(flat), 12, 8), torch.stack(flat), strict=True))
    source = iter(DataLoader(rows, batch_size=None) if loader else rows)
    told = []
    for window in masks:
        told.append([])
        for _ in window:
            x, mask = next(source)
            losses = functional.cross_entropy(model(x), torch.arange(len(x)) % 4, reduction="none")
            loss = loss_of(losses, mask, sum(int(mask.sum()) for mask in window), len(window))
            loss.backward()
            told[-1].append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return told


UNEVEN, EVEN = ((3, 9, 5, 12), (7, 7, 2, 4), (1, 12, 8, 8), (6, 6, 6, 5)), ((12,) * 4,) * 4
MEANS = {
    "tensor": (UNEVEN, lambda losses, mask, *_: (losses * mask).sum() / mask.sum()),
    "clamped": (UNEVEN, lambda losses, mask, *_: (losses * mask).sum() / mask.sum().clamp(min=1).float()),
    "number": (UNEVEN, lambda losses, mask, *_: (losses * mask).sum() / int(mask.sum())),
    "length": (EVEN, lambda losses, *_: losses.sum() / len(losses)),
}
SHARES = {
    "all items": lambda losses, mask, total, _: (losses * mask).sum() / total,
    "a tensor of all items": lambda losses, mask, total, _: (losses * mask).sum() / torch.tensor(total),
    "means over windows": lambda losses, mask, _, windows: (losses * mask).sum() / mask.sum() / windows,
    "weighted": lambda losses, mask, total, _: (losses * mask).sum() / mask.sum() * (int(mask.sum()) / total),
    "by division": lambda losses, mask, total, _: (losses * mask).sum() / mask.sum() / (total / int(mask.sum())),
}


@by_loader
@pytest.mark.parametrize("kind", [*MEANS, *SHARES])
def test_means_of_their_own_items_are_averaged_and_shares_add_up(record, model, loader, kind):
    recorded = record(model)
    counts, loss_of = MEANS[kind] if kind in MEANS else (UNEVEN, SHARES[kind])
    windows = train_masked(model, counts, loss_of, loader=loader)
    expected = [math.fsum(window) / (len(window) if kind in MEANS else 1) for window in windows]
    start = 0 if loader else 1  # a loop's own batches are seen once the model is watched, after the first step
    assert losses_of(recorded)[start:] == pytest.approx(expected[start:], rel=1e-12)


def test_a_divisor_that_checkpointing_holds_is_not_asked_for(record, model):
    """To ask would run the model once more: batch norms would see every batch three times."""
    calls = []

    def masked_mean(x, mask):
        calls.append(1)
        return (model(x).square().mean(1) * mask).sum() / mask.sum()

    record(model)
    optimizer = sgd(model, lr=0.01)
    for _ in range(4):
        step(optimizer, checkpoint(masked_mean, torch.randn(4, 8), torch.ones(4), use_reentrant=False))
    assert len(calls) == 4 * 2


def test_a_loss_whose_parts_were_backpropagated_before_is_itself(record, model):
    """Cached gradients: the parts make the gradients of the model's output; a hook on the whole does the rest."""
    recorded, optimizer, printed = record(model), sgd(model), []
    for _ in range(3):
        out = model(torch.randn(6, 8))
        cached, loss = out.detach().requires_grad_(), torch.zeros(())
        for part in cached.chunk(3):
            part.square().mean().backward()
            loss = loss + part.detach().square().mean()
        loss.requires_grad_().register_hook(lambda _, out=out, cached=cached: out.backward(cached.grad))
        loss.backward()
        printed.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    assert losses_of(recorded) == printed
