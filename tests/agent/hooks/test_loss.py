"""The loss without user code: what a script would print, to the last bit."""

from __future__ import annotations

import math
import sys
import types

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from perfagent.step.row import StepRow

ACCUMULATE = 4


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def cross_entropy(model, x):
    return functional.cross_entropy(model(x), torch.arange(len(x)) % 4)


def accumulate(model, loss_of, *, loader=False, steps=3):
    """Trains and answers the micro-losses by step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[list[float]] = []
    batches = torch.randn(steps * ACCUMULATE, 6, 8)
    source = iter(torch.utils.data.DataLoader(batches, batch_size=None)) if loader else iter(batches)
    for _ in range(steps):
        seen.append([])
        for _ in range(ACCUMULATE):
            loss = cross_entropy(model, next(source))
            seen[-1].append(loss.item())
            loss_of(loss).backward()
        optimizer.step()
        optimizer.zero_grad()
    return seen


@pytest.mark.parametrize("loader", [True, False], ids=["DataLoader", "own batching"])
@pytest.mark.parametrize("divide", [True, False])
def test_accumulated_losses_are_averaged_whether_the_script_divides_or_not(record, model, loader, divide):
    recorded = record(model)
    seen = accumulate(model, lambda loss: loss / ACCUMULATE if divide else loss, loader=loader)
    for (_, loss), micro in zip(recorded.of("loss"), seen, strict=True):
        # the script's own division rounds each part to float32
        assert loss == pytest.approx(math.fsum(micro) / ACCUMULATE, rel=1e-6 if divide else 1e-15)


def accumulate_windows(model, windows, *, divide):
    """Trains without a loader, windows of so many micro-batches, and answers the mean loss of each."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    means = []
    for window in windows:
        losses = []
        for _ in range(window):
            loss = cross_entropy(model, torch.randn(6, 8))
            losses.append(loss.item())
            (loss / window if divide else loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        means.append(math.fsum(losses) / window)
    return means


def test_divided_losses_add_up_after_a_window_of_one_micro_batch(record, model):
    recorded = record(model)
    means = accumulate_windows(model, [4, 4, 1, 4, 4, 1, 4], divide=True)
    assert [loss for _, loss in recorded.of("loss")] == pytest.approx(means, rel=1e-6)


@pytest.mark.parametrize("last", [1, 2])
def test_the_first_step_of_an_accumulating_loop_may_be_read_after_a_short_window(record, model, last):
    recorded = record(model)
    means = accumulate_windows(model, [4, 4, last], divide=False)
    assert [loss for _, loss in recorded.of("loss")] == pytest.approx(means, rel=1e-15)


def test_several_losses_of_one_batch_add_up(record, model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorded = record(model)
    expected = []
    for x in torch.utils.data.DataLoader(torch.randn(12, 8), batch_size=6):
        out = model(x)
        first, second = out.square().mean(), out.abs().mean()
        first.backward(retain_graph=True)
        second.backward()
        expected.append(first.item() + second.item())
        optimizer.step()
        optimizer.zero_grad()
    assert [loss for _, loss in recorded.of("loss")] == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_the_value_is_exactly_what_item_gives(record, dtype):
    weight = nn.Parameter(torch.tensor([1.2345678, 2.0], dtype=dtype))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    recorded = record()
    printed = []
    for _ in range(3):
        loss = (weight * weight).sum()
        loss.backward()
        optimizer.step()
        printed.append(loss.item())
    assert [loss for _, loss in recorded.of("loss")] == printed


class CachedContrast(nn.Module):
    """A contrastive loss of more pairs than one pass of the encoder takes, as sentence-transformers computes it:
    embeddings without a graph, the loss from them in parts that are backpropagated at once, and what is returned is a
    number whose backward pass encodes again."""

    def __init__(self, encoder, part=4):
        super().__init__()
        self.encoder, self.part = encoder, part

    def forward(self, x):
        with torch.no_grad():
            rows = [self.encoder(part) for part in x.split(self.part)]
        rows = [row.requires_grad_() for row in rows]
        total, every = 0.0, torch.cat(rows)
        for first in range(0, len(x), self.part):
            targets = torch.arange(first, min(first + self.part, len(x)))
            loss = functional.cross_entropy(every[targets] @ every.T, targets, reduction="sum") / len(x)
            loss.backward(retain_graph=True)
            total += loss.detach()
        total.requires_grad_()
        total.register_hook(lambda grad: self.encode_again(x, rows, grad))
        return total

    def encode_again(self, x, rows, grad):
        with torch.enable_grad():
            for part, row in zip(x.split(self.part), rows, strict=True):
                (torch.dot(self.encoder(part).flatten(), row.grad.flatten()) * grad).backward()


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("window", [1, 2])
def test_a_loss_whose_parts_are_backpropagated_while_it_is_computed_is_told_as_a_whole(record, model, window, told):
    loss_of = CachedContrast(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    recorded = record(loss_of if told else None, optimizer=optimizer)
    printed, sizes = [], [7, 10, 10, 9, 10, 10, 8, 3]
    source = iter(torch.utils.data.DataLoader([torch.randn(size, 8) for size in sizes], batch_size=None))
    batch = next(source)
    while batch is not None:
        losses = []
        for _ in range(window):
            following = next(source, None)  # one ahead, as the Trainer does
            loss = loss_of(batch) / window
            loss.backward()
            losses.append(loss.item())
            batch = following
        optimizer.step()
        optimizer.zero_grad()
        printed.append(sum(losses))
    assert [loss for _, loss in recorded.of("loss")] == pytest.approx(printed, rel=1e-6)
    rows = [values for _, values in recorded.steps() if "samples_per_s" in values]
    consumed = [sum(sizes[first : first + window]) for first in range(window, len(sizes), window)]
    assert [round(values["samples_per_s"] * values["step_time_s"]) for values in rows] == consumed


@pytest.mark.parametrize("rows", [10, 4], ids=["parts", "a part of each side"])
def test_of_a_loss_on_cached_representations_what_carries_its_gradients_on_is_none(record, model, rows):
    """GradCache: a loss of representations without a graph, and then a product with its gradients for each part of the
    batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    recorded = record(model)
    printed = []
    for sides in torch.utils.data.DataLoader(torch.randn(6, 2, rows, 8), batch_size=None):
        parts = [part for side in sides for part in side.split(4)]
        with torch.no_grad():
            cached = [model(part) for part in parts]
        cached = [one.requires_grad_() for one in cached]
        first, second = torch.cat(cached).chunk(2)
        loss = functional.cross_entropy(first @ second.T, torch.arange(rows))
        loss.backward()
        for part, one in zip(parts, cached, strict=True):
            torch.dot(model(part).flatten(), one.grad.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        printed.append(loss.item())
    told = dict(recorded.of("loss"))
    assert [told[step] for step in range(3, 7)] == printed[2:], "from where it is seen what each step does"


def test_autograd_backward_and_a_list_of_roots_are_seen(record, model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorded = record(model)
    first, second = model(torch.randn(2, 8)).square().mean(), model(torch.randn(2, 8)).abs().mean()
    torch.autograd.backward([first, second])
    optimizer.step()
    assert recorded.of("loss") == [(1, first.item() + second.item())]


@pytest.mark.parametrize("named", [True, False])
def test_a_vector_of_losses_counts_with_its_weights(record, model, named):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorded = record(model)
    printed = []
    for _ in range(3):
        losses = model(torch.randn(5, 8)).square().mean(1)
        weights = torch.rand(5)
        optimizer.zero_grad()
        losses.backward(gradient=weights) if named else torch.autograd.backward([losses], [weights])
        optimizer.step()
        printed.append((losses * weights).sum().item())
    assert [loss for _, loss in recorded.of("loss")] == (printed if named else [])


def test_what_a_pipeline_stage_passes_on_is_no_loss(record, model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorded = record(model)
    out = model(torch.randn(5, 8))
    out.backward(torch.rand(5, 4))
    optimizer.step()
    assert recorded.of("loss") == []


@pytest.mark.parametrize("loader", [True, False], ids=["DataLoader", "own batching"])
@pytest.mark.parametrize("told", ["optimizer", "model", "nothing"])
def test_of_two_passes_with_the_gradients_cleared_in_between_the_first_counts(record, model, loader, told):
    """Sharpness-aware minimization: the second pass is at other weights."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorded = record(model if told != "nothing" else None, optimizer=optimizer if told == "optimizer" else None)
    batches = torch.randn(5, 6, 8)
    printed = []
    for x in torch.utils.data.DataLoader(batches, batch_size=None) if loader else batches:
        loss = cross_entropy(model, x)
        loss.backward()
        printed.append(loss.item())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(parameter.grad, alpha=0.05)
        model.zero_grad()
        cross_entropy(model, x).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert [loss for _, loss in recorded.of("loss")] == printed


class Sharpness(torch.optim.Optimizer):
    """Sharpness-aware minimization by a closure, which is called at other weights than those of the pass before the
    step."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})
        self.inside = torch.optim.SGD(self.param_groups, lr=0.1)

    def step(self, closure):
        parameters = self.param_groups[0]["params"]
        with torch.no_grad():
            moves = [0.05 * parameter.grad for parameter in parameters]
            for parameter, move in zip(parameters, moves, strict=True):
                parameter += move
        self.zero_grad()
        closure()
        with torch.no_grad():
            for parameter, move in zip(parameters, moves, strict=True):
                parameter -= move
        self.inside.step()


def test_the_pass_of_a_closure_after_the_gradients_were_cleared_is_at_other_weights(record, model):
    optimizer = Sharpness(model.parameters())
    recorded = record()
    printed = []
    for x in torch.randn(5, 6, 8):
        loss = cross_entropy(model, x)
        loss.backward()
        printed.append(loss.item())
        optimizer.step(lambda x=x: cross_entropy(model, x).backward())
        optimizer.zero_grad()
    assert [loss for _, loss in recorded.of("loss")] == printed


def test_losses_whose_gradients_are_taken_one_by_one_of_one_forward_pass_add_up(record, model):
    """Gradient surgery: the loop keeps what each loss gives, clears, and combines."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorded = record(model)
    printed = []
    for x in torch.randn(5, 6, 8):
        output = model(x)
        losses = [output.square().mean(), output.abs().mean(), (output - 1).square().mean()]
        gradients = []
        for loss in losses:
            optimizer.zero_grad()
            loss.backward(retain_graph=True)
            gradients.append([parameter.grad for parameter in model.parameters()])
        for parameter, parts in zip(model.parameters(), zip(*gradients, strict=True), strict=True):
            parameter.grad = torch.stack(parts).sum(0)
        optimizer.step()
        printed.append(sum(loss.item() for loss in losses))
    told = dict(recorded.of("loss"))
    assert {step: told[step] for step in range(2, 6)} == pytest.approx(dict(enumerate(printed[1:], 2)), rel=1e-6)


def test_a_pass_that_the_loop_discards_is_none_of_the_step(record, model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorded = record(model, optimizer=optimizer)
    printed = []
    for number, x in enumerate(torch.utils.data.DataLoader(torch.randn(8, 6, 8), batch_size=None)):
        loss = cross_entropy(model, x)
        loss.backward()
        if number % 4 != 2:
            optimizer.step()
            printed.append(loss.item())
        optimizer.zero_grad()
    assert [loss for _, loss in recorded.of("loss")] == printed


@pytest.mark.parametrize("evaluates", [False, True])
@pytest.mark.parametrize("clears", ["before the epoch", "with its first batch"])
def test_a_window_that_the_end_of_an_epoch_cuts_short_is_none_of_the_next_step(record, model, clears, evaluates):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorded = record(model, optimizer=optimizer)
    data, printed = torch.randn(5, 6, 8), []
    for _ in range(3):
        window = []
        if clears == "before the epoch":
            optimizer.zero_grad()
        for number, x in enumerate(torch.utils.data.DataLoader(data, batch_size=None)):
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
                for x in torch.utils.data.DataLoader(data, batch_size=None):
                    model.eval()(x)
            model.train()
    assert [loss for _, loss in recorded.of("loss")] == pytest.approx(printed, rel=1e-6)


def test_checkpointing_calls_backward_inside_and_counts_once(record, model):
    from torch.utils.checkpoint import checkpoint

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorded = record(model)
    x = torch.randn(2, 8, requires_grad=True)
    loss = checkpoint(model, x, use_reentrant=True).square().mean()
    loss.backward()
    optimizer.step()
    assert recorded.of("loss") == [(1, loss.item())]


def test_a_loss_beyond_half_precision_when_scaled_is_still_itself(record):
    weight = nn.Parameter(torch.tensor([3.0], dtype=torch.float16))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
    recorded = record()
    loss = weight.sum(dim=0, keepdim=True)
    scaled = scaler.scale(loss)
    assert not scaled.isfinite()
    scaled.backward()
    optimizer.step()
    assert recorded.of("loss") == [(1, 3.0)]


def test_nan_is_ready_at_once_and_counts_the_gradients(record, model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorded = record(model)
    loss = model(torch.full((2, 8), float("nan"))).square().mean()
    loss.backward()
    optimizer.step()
    (step, values), *_ = [row for row in recorded.sender.drain() if "lr" in row[1]]
    assert step == 1
    assert math.isnan(values["loss"])
    assert math.isnan(values["grad/norm"])
    assert values["grad/nonfinite"] == 4


# ---- the user's own loss


def test_an_explicit_loss_stands_alone_at_its_step(record, model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorded = record(model)
    printed = []
    for _ in range(4):
        loss = cross_entropy(model, torch.randn(6, 8))
        loss.backward()
        optimizer.step()
        recorded.run.log({"loss": loss.item()})
        printed.append(loss.item())
    assert recorded.of("loss") == list(enumerate(printed, start=1))


def test_an_explicit_loss_every_other_step_leaves_ours_between(record, model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorded = record(model)
    printed = []
    for step in range(1, 7):
        loss = cross_entropy(model, torch.randn(6, 8))
        loss.backward()
        optimizer.step()
        if step % 2:
            recorded.run.log({"loss": loss})
        printed.append(loss.item())
    assert recorded.of("loss") == list(enumerate(printed, start=1))


def test_a_different_quantity_named_loss_takes_the_series_over(record, model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorded = record(model)
    for step in range(1, 6):
        cross_entropy(model, torch.randn(6, 8)).backward()
        optimizer.step()
        if step == 2:
            recorded.run.log({"loss": 17.0})
        recorded.rows += recorded.sender.drain()
    assert recorded.of("loss")[-1] == (2, 17.0)


def test_a_loss_logged_under_other_step_numbers_takes_the_series_over(record, model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorded = record(model)
    for iteration in range(3):
        cross_entropy(model, torch.randn(6, 8)).backward()
        optimizer.step()
        recorded.run.log({"loss": 0.5}, step=iteration)
    assert recorded.of("loss") == [(0, 0.5), (1, 0.5), (2, 0.5)]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_makes_its_step_unusual(record, model, bad):
    # so that it is not passed on as a step of the usual kind, but at once (delivery/drain.py)
    recorded = record(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for factor in (1.0, 1.0, bad, 1.0):
        (model(torch.randn(6, 8)).square().mean() * factor).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        for parameter in model.parameters():  # what the bad step did to them
            parameter.data.nan_to_num_(0.1, 0.1, 0.1)
    usual = [row.rare is None for row in recorded.sender.rows if isinstance(row, StepRow)]
    assert usual[2] is False
    assert usual[1] is True


# ---- means over what a mask leaves -----------------------------------------------------------------------------------


def train_masked(model, masks, loss_of, *, loader=False):
    """masks: of each window the masks of its micro-batches; answers of each window the losses as the script has
    them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    flat = [mask for window in masks for mask in window]
    batches = list(zip(torch.randn(len(flat), len(flat[0]), 8), torch.stack(flat), strict=True))
    source = iter(torch.utils.data.DataLoader(batches, batch_size=None) if loader else batches)
    told = []
    for window in masks:
        total = sum(int(mask.sum()) for mask in window)
        told.append([])
        for _ in window:
            x, mask = next(source)
            losses = functional.cross_entropy(model(x), torch.arange(len(x)) % 4, reduction="none")
            loss = loss_of(losses, mask, total, len(window))
            loss.backward()
            told[-1].append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return told


def masked(count: int, of: int = 12) -> torch.Tensor:
    return torch.arange(of) < count


UNEVEN = [[masked(n) for n in counts] for counts in ((3, 9, 5, 12), (7, 7, 2, 4), (1, 12, 8, 8), (6, 6, 6, 5))]
EVEN = [[masked(12) for _ in range(4)] for _ in range(4)]


@pytest.mark.parametrize("loader", [True, False], ids=["DataLoader", "own batching"])
@pytest.mark.parametrize(
    ("masks", "loss_of"),
    [
        (UNEVEN, lambda losses, mask, *_: (losses * mask).sum() / mask.sum()),
        (UNEVEN, lambda losses, mask, *_: (losses * mask).sum() / mask.sum().clamp(min=1).float()),
        (UNEVEN, lambda losses, mask, *_: (losses * mask).sum() / int(mask.sum())),
        (EVEN, lambda losses, *_: losses.sum() / len(losses)),
    ],
    ids=["tensor", "clamped", "number", "length"],
)
def test_means_of_their_own_items_are_averaged(record, model, loader, masks, loss_of):
    recorded = record(model)
    told = train_masked(model, masks, loss_of, loader=loader)
    expected = [math.fsum(window) / len(window) for window in told]
    start = 0 if loader else 1  # a loop's own batches are seen once the model is watched, after the first step
    assert [loss for _, loss in recorded.of("loss")][start:] == pytest.approx(expected[start:], rel=1e-12)


@pytest.mark.parametrize("loader", [True, False], ids=["DataLoader", "own batching"])
@pytest.mark.parametrize(
    "loss_of",
    [
        lambda losses, mask, total, _: (losses * mask).sum() / total,
        lambda losses, mask, total, _: (losses * mask).sum() / torch.tensor(total),
        lambda losses, mask, _, windows: (losses * mask).sum() / mask.sum() / windows,
        lambda losses, mask, total, _: (losses * mask).sum() / mask.sum() * (int(mask.sum()) / total),
        lambda losses, mask, total, _: (losses * mask).sum() / mask.sum() / (total / int(mask.sum())),
    ],
    ids=["all items", "a tensor of all items", "means over windows", "weighted", "weighted by division"],
)
def test_shares_of_a_windows_loss_add_up(record, model, loader, loss_of):
    recorded = record(model)
    told = train_masked(model, UNEVEN, loss_of, loader=loader)
    assert [loss for _, loss in recorded.of("loss")] == pytest.approx([math.fsum(window) for window in told], rel=1e-12)


@pytest.mark.parametrize("loader", [True, False], ids=["DataLoader", "own batching"])
def test_several_losses_of_each_micro_batch_are_divided_by_the_number_of_those(record, model, loader):
    """Two of each of four, eight samples a batch: what divides them is as often in the samples as there are losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    recorded = record(model)
    batches = list(torch.randn(16, 8, 8))
    source = iter(torch.utils.data.DataLoader(batches, batch_size=None) if loader else batches)
    told = []
    for _ in range(4):
        told.append(0.0)
        for _ in range(4):
            y = model(next(source))
            for loss in (y.square().mean() / 4, y.abs().mean() / 4):
                loss.backward(retain_graph=True)
                told[-1] += loss.item()
        optimizer.step()
        optimizer.zero_grad()
    assert [loss for _, loss in recorded.of("loss")] == pytest.approx(told, rel=1e-6)


def test_a_graph_that_is_gone_says_nothing_of_a_divisor(record, model):
    """A second backward pass fails in the script as ever, and the run goes on."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    recorded = record(model)
    for _ in range(3):
        loss = cross_entropy(model, torch.randn(4, 8)) / 2
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(recorded.of("loss")) == 3


def test_a_divisor_that_checkpointing_holds_is_not_asked_for(record, model):
    """To ask would run the model once more: batch norms would see every batch three times."""
    calls = 0

    def masked_mean(x, mask):
        nonlocal calls
        calls += 1
        return (model(x).square().mean(1) * mask).sum() / mask.sum()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    record(model)
    for _ in range(2):
        for _ in range(2):
            checkpoint(masked_mean, torch.randn(4, 8), torch.ones(4), use_reentrant=False).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert calls == 2 * 2 * 2


def test_what_hooks_hold_is_given_back_once(record, model):
    """Offloading reads a file, or waits for another device, whenever it is asked."""
    asked = 0

    def give_back(tensor):
        nonlocal asked
        asked += 1
        return tensor

    def asked_in(loss):
        nonlocal asked
        asked = 0
        loss.backward()
        return asked

    def loss_of():
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, give_back):
            return cross_entropy(model, torch.randn(4, 8)) / torch.tensor(2.0)

    without = asked_in(loss_of())
    record(model)
    assert asked_in(loss_of()) == without


class OfPoutyne:
    """What it does with `batches_per_step`: the last step of an epoch may have fewer batches, the last batch fewer
    samples."""

    def __init__(self, network):
        self.network = network

    def _adjust_step_size(self, examples_in_step):
        for parameter in self.network.parameters():
            parameter.grad /= examples_in_step


def test_a_loss_whose_gradients_poutyne_divides_at_the_end_of_a_window_is_divided_too(record, model, monkeypatch):
    framework = types.ModuleType("poutyne.framework.model")
    framework.Model = OfPoutyne  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "poutyne.framework.model", framework)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorded = record(model)
    divides, losses = OfPoutyne._adjust_step_size, []
    assert divides.__wrapped__  # type: ignore[attr-defined]
    for sizes in ((4, 4), (4, 4), (4,), (4, 4), (4, 3), (2,)):
        optimizer.zero_grad()
        total = 0.0
        for size in sizes:
            loss = cross_entropy(model, torch.randn(size, 8))
            total += loss.item() * size
            (loss * size).backward()
        OfPoutyne(model)._adjust_step_size(sum(sizes))
        optimizer.step()
        losses.append(total / sum(sizes))
    assert recorded.of("loss") == [(step, pytest.approx(loss, rel=1e-6)) for step, loss in enumerate(losses, 1)]
    assert not hasattr(OfPoutyne._adjust_step_size, "__wrapped__")
