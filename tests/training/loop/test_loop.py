"""One process: windows, precision, clipping, schedule, position and state of a loop."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    TensorDataset,
)

import perfagent
from perfagent.errors import ConfigError

Batch = tuple[Tensor, Tensor]


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1))


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def batches_of(sizes: list[int]) -> list[Batch]:
    generator = torch.Generator().manual_seed(5)
    return [(torch.randn(size, 5, generator=generator), torch.randn(size, 1, generator=generator)) for size in sizes]


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def big_batches(data: list[Batch], accumulated: int, *, clip: float | None = None, epochs: int = 1) -> Tensor:
    """The weights after an optimizer step for each window taken as one batch, without the loop."""
    model = net()
    optimizer = sgd(model)
    for begin in [*range(0, len(data), accumulated)] * epochs:
        window = data[begin : begin + accumulated]
        loss_of(model, (torch.cat([x for x, _ in window]), torch.cat([y for _, y in window]))).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return flat(model)


class Stream(IterableDataset[Batch]):
    """No length."""

    def __init__(self, batches: list[Batch]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._batches)


def run(
    loop: perfagent.Loop, loader: Any, *, counts: str = "int", epochs: int | None = 1, **options: Any
) -> list[perfagent.StepResult]:
    results = []
    for batch in loop.batches(loader, epochs, **options):
        with loop.forward():
            loss = loss_of(loop.model, batch)
        size = len(batch[0])
        loop.backward(loss, {"int": size, "tensor": torch.tensor(size), "none": None}[counts])
        results.append(loop.step())
    return results


# ---- windows


@pytest.mark.parametrize("counts", ["int", "tensor", "items"])
@pytest.mark.parametrize("loader", [list, Stream], ids=["sized", "stream"])
def test_unequal_micro_batches_have_the_gradient_of_their_big_batch(counts: str, loader: Any) -> None:
    data = batches_of([4, 1, 7, 2, 3, 5, 6])  # windows of 3, 3 and 1
    model = net()
    loop = perfagent.loop(model, sgd(model), grad_accum=3, clip_norm=0.3)
    if counts == "items":
        run(loop, loader(data), counts="none", epochs=2, items=lambda batch: len(batch[0]))
    else:
        run(loop, loader(data), counts=counts, epochs=2)
    assert loop.step_count == 6
    torch.testing.assert_close(flat(model), big_batches(data, 3, clip=0.3, epochs=2), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("loader", [list, Stream], ids=["sized", "stream"])
def test_a_short_last_window_weighs_as_much_as_it_has_micro_steps(loader: Any) -> None:
    data = batches_of([4] * 5)
    model = net()
    loop = perfagent.loop(model, sgd(model), grad_accum=3)
    results = run(loop, loader(data), counts="none")
    assert [result.stepped for result in results] == [False, False, True, False, True]
    torch.testing.assert_close(flat(model), big_batches(data, 3), rtol=1e-5, atol=1e-6)


def test_a_window_without_any_item_leaves_the_weights_as_they_are() -> None:
    model = net()
    loop = perfagent.loop(model, torch.optim.SGD(model.parameters(), lr=1.0), grad_accum=2)
    before = flat(model)
    for batch in loop.batches(batches_of([3, 3])):
        with loop.forward():
            loss = loss_of(model, batch) * 0.0
        loop.backward(loss, 0)
        loop.step()
    assert torch.equal(flat(model), before)


def test_a_loader_that_ends_before_its_length_is_stepped_at_its_end() -> None:
    class Short(list[Batch]):
        def __len__(self) -> int:
            return 9

    data = batches_of([4, 2, 5, 3])
    model = net()
    loop = perfagent.loop(model, sgd(model), grad_accum=3)
    run(loop, Short(data))
    assert loop.step_count == 2
    torch.testing.assert_close(flat(model), big_batches(data, 3), rtol=1e-5, atol=1e-6)


def test_a_loop_of_ones_own_says_where_a_window_ends() -> None:
    data = batches_of([2, 2])
    model = net()
    loop = perfagent.loop(model, sgd(model), grad_accum=4)
    for number, batch in enumerate(data):
        with loop.forward(last=number == 1):
            loss = loss_of(model, batch)
        loop.backward(loss)
        result = loop.step()
    assert result.stepped
    torch.testing.assert_close(flat(model), big_batches(data, 2), rtol=1e-5, atol=1e-6)


def test_a_window_left_in_its_middle_is_thrown_away_by_the_next_reading() -> None:
    data = batches_of([2, 3, 4, 5])
    model = net()
    loop = perfagent.loop(model, sgd(model), grad_accum=2)
    for batch in loop.batches(data[2:]):
        with loop.forward():
            loss = loss_of(model, batch)
        loop.backward(loss)
        break
    assert loop.micro_steps == 1
    run(loop, data[:2])
    torch.testing.assert_close(flat(model), big_batches(data[:2], 2), rtol=1e-5, atol=1e-6)


def test_reading_ends_at_a_number_of_steps() -> None:
    model = net()
    loop = perfagent.loop(model, sgd(model), grad_accum=2)
    run(loop, batches_of([2] * 5), epochs=None, steps=7)  # three steps an epoch
    assert (loop.step_count, loop.epoch) == (7, 2)


# ---- precision, clipping, schedule


def test_products_run_in_bf16_and_weights_stay_in_fp32() -> None:
    model = net()
    loop = perfagent.loop(model, sgd(model), precision="bf16")
    for batch in loop.batches(batches_of([4])):
        with loop.forward():
            out = model(batch[0])
        loop.backward(nn.functional.mse_loss(out.float(), batch[1]))
        loop.step()
    assert out.dtype == torch.bfloat16
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


def test_fp16_trains_like_autocast_and_scaler_by_hand() -> None:
    data = batches_of([4, 3, 5])
    by_hand = net()
    optimizer, scaler = sgd(by_hand), torch.amp.GradScaler("cpu", init_scale=256.0)
    for batch in data:
        with torch.autocast("cpu", torch.float16):
            loss = loss_of(by_hand, batch)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(by_hand.parameters(), 0.2)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    model = net()
    loop = perfagent.loop(
        model, sgd(model), precision="fp16", clip_norm=0.2, scaler=torch.amp.GradScaler("cpu", init_scale=256.0)
    )
    run(loop, data)
    assert torch.equal(flat(model), flat(by_hand))


def test_clipping_sees_the_true_gradients_not_the_scaled_ones() -> None:
    norms = []
    for precision, scaler in (("fp32", None), ("fp16", torch.amp.GradScaler("cpu", init_scale=4096.0))):
        model = net()
        loop = perfagent.loop(model, sgd(model), precision=precision, clip_norm=0.05, scaler=scaler)
        norms.append(float(run(loop, batches_of([4]))[0].grad_norm))  # type: ignore[arg-type]
    assert norms[1] == pytest.approx(norms[0], rel=1e-2)


@pytest.mark.parametrize("fused", [False, True])
def test_an_overflow_is_skipped_counted_and_halves_the_scale(fused: bool) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    loop = perfagent.loop(model, optimizer, schedule, precision="fp16", scaler=scaler, clip_norm=None)
    before, seen = flat(model), []
    for number, batch in enumerate(loop.batches(batches_of([4, 4]))):
        with loop.forward():
            loss = loss_of(model, batch)
        loop.backward(loss * (float("inf") if number == 0 else 1.0))
        result = loop.step()
        seen.append((result.stepped, result.skipped))
        if number == 0:
            assert torch.equal(flat(model), before)
    assert seen == [(True, True), (True, False)]
    assert loop.step_count == 2
    assert scaler.get_scale() == 512.0
    if not fused:  # a fused optimizer tells only the device
        assert schedule.last_epoch == 1


def test_the_scheduler_moves_once_a_window() -> None:
    model = net()
    optimizer = sgd(model, lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    loop = perfagent.loop(model, optimizer, schedule, grad_accum=2)
    run(loop, batches_of([2] * 5))
    assert schedule.last_epoch == loop.step_count == 3
    assert optimizer.param_groups[0]["lr"] == 0.125


def test_a_scheduler_that_wants_a_metric_is_stepped_by_the_user_and_saved_by_the_loop() -> None:
    model = net()
    optimizer = sgd(model, lr=1.0)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    loop = perfagent.loop(model, optimizer, plateau)
    for metric in (1.0, 2.0):
        run(loop, batches_of([2, 2]))
        plateau.step(metric)
    assert optimizer.param_groups[0]["lr"] == 0.5
    other = net()
    again = sgd(other, lr=1.0)
    resumed = torch.optim.lr_scheduler.ReduceLROnPlateau(again, factor=0.5, patience=0)
    perfagent.loop(other, again, resumed).load_state_dict(loop.state_dict())
    assert (again.param_groups[0]["lr"], resumed.best) == (0.5, 1.0)


def test_two_losses_have_a_loop_each() -> None:
    """A generator and its critic: neither steps, clears or counts what is the other's."""
    first, second = net(), net()
    one, two = perfagent.loop(first, sgd(first), grad_accum=2), perfagent.loop(second, sgd(second), clip_norm=1.0)
    data = batches_of([3, 3, 3, 3])
    for batch in one.batches(data):
        with one.forward():
            loss = loss_of(first, batch)
        one.backward(loss)
        one.step()
        with two.forward(last=True):
            other = loss_of(second, batch)
        two.backward(other)
        two.step()
    assert (one.step_count, two.step_count) == (2, 4)
    torch.testing.assert_close(flat(first), big_batches(data, 2), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(flat(second), big_batches(data, 1, clip=1.0), rtol=1e-5, atol=1e-6)


def test_a_forward_pass_within_another_leaves_no_autocast_on() -> None:
    model = net()
    loop = perfagent.loop(model, sgd(model), precision="bf16")
    x, _ = batches_of([2])[0]
    with loop.forward():
        with loop.forward(), torch.no_grad():  # a teacher's, say
            model(x)
        assert model(x).dtype == torch.bfloat16
    assert not torch.is_autocast_enabled("cpu")
    assert model(x).dtype == torch.float32


def test_nothing_is_read_of_the_norm_until_it_is_asked_for() -> None:
    model = net()
    loop = perfagent.loop(model, sgd(model), clip_norm=1e9)
    result = run(loop, batches_of([4]))[0]
    assert isinstance(result.grad_norm, Tensor)
    assert "not read" in repr(result)
    assert perfagent.StepResult.WAITING.grad_norm is None


def test_a_compiled_model_keeps_its_type_and_its_names() -> None:
    model = net()
    names = [*model.state_dict()]
    loop = perfagent.loop(model, sgd(model), compile={"backend": "eager"})
    run(loop, batches_of([4, 4]))
    assert [*model.state_dict()] == names
    assert model._compiled_call_impl is not None
    torch.testing.assert_close(flat(model), big_batches(batches_of([4, 4]), 1), rtol=1e-5, atol=1e-6)


# ---- what is refused


class Epochwise:
    """A scheduler as other libraries have them."""

    def step(self, epoch: int) -> None: ...


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"precision": "fp8"}, "fp32, bf16, fp16"),
        ({"grad_accum": 0}, "1 or more"),
        ({"grad_accum": 2.0}, "1 or more"),
        ({"clip_norm": 0}, "above 0"),
        ({"clip_norm": float("nan")}, "above 0"),
        ({"clip_norm": "1"}, "above 0"),
        ({"clip_norm": True}, "above 0"),
        ({"scheduler": object()}, "step()"),
        ({"scheduler": Epochwise()}, "wants 'epoch'"),
        ({"checkpoint": "runs/a"}, "perfagent.Checkpoint"),
        ({"compile": "fastest"}, "max-autotune"),
        ({"compile": 3}, "a mode of torch.compile"),
        ({"precision": "bf16", "scaler": torch.amp.GradScaler("cpu")}, "precision='fp16'"),
    ],
)
def test_an_option_that_cannot_be_is_refused_with_what_can(options: dict[str, Any], words: str) -> None:
    model = net()
    with pytest.raises(ConfigError) as refused:
        perfagent.loop(model, sgd(model), **options)
    assert words in str(refused.value)


def test_what_is_no_model_or_no_optimizer_of_it_is_refused() -> None:
    model = net()
    with pytest.raises(ConfigError, match="not str"):
        perfagent.loop("resnet", sgd(model))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="not NoneType"):
        perfagent.loop(model)
    with pytest.raises(ConfigError, match="none of the model's parameters"):
        perfagent.loop(model, sgd(net()))
    with pytest.raises(ConfigError, match="parameter groups of one"):
        perfagent.loop(model, [sgd(model), sgd(model)])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="LBFGS wants 'closure'"):
        perfagent.loop(model, torch.optim.LBFGS(model.parameters()))
    with pytest.raises(ConfigError, match="DataParallel inside"):
        perfagent.loop(nn.Sequential(nn.DataParallel(model)), sgd(model))
    with pytest.raises(ConfigError, match="float16 already"):
        perfagent.loop(model.half(), sgd(model), precision="fp16")


def test_verbs_out_of_order_are_refused_in_words() -> None:
    model = net()
    loop = perfagent.loop(model, sgd(model), grad_accum=2)
    with pytest.raises(ConfigError, match="without a backward"):
        loop.step()
    with pytest.raises(ConfigError, match="never end"):
        loop.batches([], epochs=None)
    with pytest.raises(ConfigError, match="no batch"):
        next(loop.batches([]))
    with pytest.raises(ConfigError, match="not int"):
        loop.batches(3)  # type: ignore[arg-type]
    first, second = batches_of([2, 2])
    loop.backward(loss_of(model, first), 2)
    with pytest.raises(ConfigError, match="for all or none"):
        loop.backward(loss_of(model, second))


# ---- position and state


def loader(workers: int = 0, **options: Any) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(11)
    data = TensorDataset(torch.randn(22, 5, generator=generator), torch.randn(22, 1, generator=generator))
    return DataLoader(data, batch_size=3, shuffle=True, num_workers=workers, **options)


class Dropout(nn.Module):
    """A model that draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(nn.functional.dropout(x, 0.3))
        return out


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def made(precision: str = "fp32") -> perfagent.Loop:
    model = Dropout()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    return perfagent.loop(model, optimizer, schedule, precision=precision, grad_accum=2, clip_norm=0.5)


STOPS = (1, 3, 4, 5, 11)  # in the middle, at the end of an epoch (4), right after it


def step(loop: perfagent.Loop, batch: Any) -> float:
    """The loss of one step."""
    with loop.forward():
        loss = loss_of(loop.model, batch)
    loop.backward(loss, len(batch[0]))
    loop.step()
    return loss.item()


def train(loop: perfagent.Loop, data: Any, steps: int | None = None) -> list[float]:
    """The losses of three epochs, or up to so many steps of the loop."""
    return [step(loop, batch) for batch in loop.batches(data, 3, steps=steps)]


@pytest.mark.parametrize(
    ("case", "stop"), [*itertools.product(("shuffled", "generator", "stream"), STOPS), ("workers", 3)]
)
def test_a_loop_that_was_stopped_goes_on_as_if_it_had_not_been(case: str, stop: int) -> None:
    def source() -> Any:
        if case == "generator":
            return loader(generator=torch.Generator().manual_seed(2))
        if case == "stream":
            return DataLoader(Stream(batches_of([3] * 8)), batch_size=None)
        return loader(workers=2 if case == "workers" else 0)

    torch.manual_seed(1)
    whole = made()
    expected = train(whole, source())
    torch.manual_seed(1)
    first = made()
    begun = train(first, source(), stop)
    state = first.state_dict()
    torch.manual_seed(99)  # another process
    second = made()
    data = source()
    if case == "generator":
        data.generator.manual_seed(77)
    second.load_state_dict(state)
    assert second.step_count == stop
    assert begun + train(second, data) == expected
    assert torch.equal(flat(second.model), flat(whole.model))
    assert (second.step_count, second.epoch) == (12, 3)


class Augmented(Dataset[Any]):
    """Adds noise from a generator of its own."""

    def __init__(self, draw: Any) -> None:
        self.draw = draw

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        return torch.full((5,), index / 24 + self.draw()), torch.ones(1)


class OwnOrder(Sampler[int]):
    """Shuffles with a generator that no attribute called `generator` holds."""

    def __init__(self, rng: Any) -> None:
        self.rng = rng

    def __len__(self) -> int:
        return 24

    def __iter__(self) -> Iterator[int]:
        order = [*range(24)]
        self.rng.shuffle(order)
        return iter(order)


class Noisy(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        for index in range(24):
            yield torch.full((5,), index / 24) + 0.1 * torch.rand(5), torch.full((1,), random.random())


def still() -> float:
    return 0.0


def with_generator(kind: str, seed: int) -> Any:
    """A loader with a generator of its own, which another process seeds in another way."""
    torch_generator = torch.Generator().manual_seed(seed)
    plain = Augmented(still)
    if kind == "batch sampler":
        order = RandomSampler(plain, generator=torch_generator)
        return DataLoader(plain, batch_sampler=BatchSampler(order, 3, drop_last=False))
    if kind == "numpy in a sampler":
        return DataLoader(plain, batch_size=3, sampler=OwnOrder(np.random.default_rng(seed)))
    if kind == "python in a sampler":
        return DataLoader(plain, batch_size=3, sampler=OwnOrder(random.Random(seed)))
    if kind == "numpy in a subset":
        rng = np.random.default_rng(seed)
        data = Subset(Augmented(rng.random), range(24))
        data.dataset.rng = rng  # type: ignore[attr-defined]
        return DataLoader(data, batch_size=3, shuffle=True)
    return DataLoader(Noisy(), batch_size=3)


@pytest.mark.parametrize("grad_accum", [1, 2])
@pytest.mark.parametrize(
    "kind", ["batch sampler", "numpy in a sampler", "python in a sampler", "numpy in a subset", "noisy stream"]
)
def test_every_generator_of_a_loader_goes_on_in_the_middle_of_an_epoch(kind: str, grad_accum: int) -> None:
    def training() -> perfagent.Loop:
        model = Dropout()
        return perfagent.loop(model, torch.optim.AdamW(model.parameters(), lr=0.01), grad_accum=grad_accum)

    seed_all(1)
    expected = train(training(), with_generator(kind, 2))
    seed_all(1)
    first = training()
    begun = train(first, with_generator(kind, 2), 3)
    state = copy.deepcopy(first.state_dict())
    seed_all(99)
    second = training()
    second.load_state_dict(state)
    assert begun + train(second, with_generator(kind, 77)) == expected


def test_a_loader_that_cannot_continue_exactly_says_so(caplog: pytest.LogCaptureFixture) -> None:
    first = made()
    train(first, loader(generator=torch.Generator()), 3)
    second = made()
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    train(second, loader(), 4)
    assert "random generators" in caplog.text


@pytest.mark.parametrize("stop", [3, 4, 5, 8])  # in the middle of an epoch, at its end, after it
def test_epochs_that_are_read_one_by_one_go_on_from_the_epoch_of_the_loop(stop: int) -> None:
    def train(loop: perfagent.Loop, steps: int | None) -> list[float]:
        data = loader()
        return [step(loop, batch) for _ in range(loop.epoch, 3) for batch in loop.batches(data, steps=steps)]

    torch.manual_seed(1)
    whole = made()
    expected = train(whole, None)
    torch.manual_seed(1)
    first = made()
    begun = train(first, stop)
    state = first.state_dict()
    torch.manual_seed(99)
    second = made()
    second.load_state_dict(state)
    assert begun + train(second, None) == expected
    assert (second.step_count, second.epoch) == (whole.step_count, 3) == (12, 3)


@pytest.mark.parametrize("same_process", [False, True])
def test_workers_that_stay_for_all_epochs_go_on_as_if_they_had_not_been_stopped(same_process: bool) -> None:
    torch.manual_seed(1)
    expected = train(made(), loader(workers=1, persistent_workers=True))
    torch.manual_seed(1)
    data, first = loader(workers=1, persistent_workers=True), made()
    begun = train(first, data, 6)  # in the second epoch
    state = copy.deepcopy(first.state_dict())
    train(first, data, 9)
    torch.manual_seed(99)
    again = made()
    again.load_state_dict(state)
    assert begun + train(again, data if same_process else loader(workers=1, persistent_workers=True)) == expected


def test_a_state_put_back_in_the_middle_of_a_window_begins_a_new_window() -> None:
    data = batches_of([2, 3, 4, 5])
    model = net()
    loop = perfagent.loop(model, sgd(model), grad_accum=2)
    begin = copy.deepcopy(loop.state_dict())
    for batch in itertools.islice(loop.batches(data), 3):
        with loop.forward():
            loss = loss_of(model, batch)
        loop.backward(loss * 10.0)
        loop.step()
    assert loop.micro_steps == 1
    loop.load_state_dict(begin)
    assert (loop.step_count, loop.micro_steps) == (0, 0)
    run(loop, data, counts="int")
    torch.testing.assert_close(flat(model), big_batches(data, 2), rtol=1e-5, atol=1e-6)


class Stateful:
    """Hands out numbers, and is asked for its place before it is read ahead."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Iterator[Batch]:
        data = batches_of([2] * 6)
        while self.place < 6:
            self.place += 1
            yield data[self.place - 1]
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


def test_a_loader_with_a_state_of_its_own_is_given_it_back() -> None:
    model = net()
    loop = perfagent.loop(model, sgd(model), grad_accum=2)
    run(loop, Stateful(), steps=2)
    state = loop.state_dict()
    assert state["sampler"] == {"place": 4}
    other = net()
    again = perfagent.loop(other, sgd(other), grad_accum=2)
    again.load_state_dict(state)
    run(again, Stateful())
    assert again.step_count == 3
    torch.testing.assert_close(flat(other), big_batches(batches_of([2] * 6), 2), rtol=1e-5, atol=1e-6)


def test_a_state_taken_within_a_window_passes_over_no_batch_that_was_not_used() -> None:
    """After an exception: the loader is two batches ahead of the weights."""
    model = net()
    loop = perfagent.loop(model, sgd(model), grad_accum=3)
    with pytest.raises(ZeroDivisionError):
        for number, batch in enumerate(loop.batches(Stateful())):
            with loop.forward():
                loss = loss_of(model, batch) / (1 if number < 4 else 0 // 0)
            loop.backward(loss)
            loop.step()
    state = loop.state_dict()
    assert state["loop"]["batch"] == 3
    other = net()
    again = perfagent.loop(other, sgd(other), grad_accum=3)
    again.load_state_dict(state)
    run(again, Stateful())
    torch.testing.assert_close(flat(other), big_batches(batches_of([2] * 6), 3), rtol=1e-5, atol=1e-6)


def test_a_state_holds_what_the_documentation_names() -> None:
    state = made("fp16").state_dict()
    assert set(state) == {"model", "optimizer", "scheduler", "scaler", "rng", "sampler", "loop"}
    assert {"step_count", "epoch", "batch", "run_id"} <= set(state["loop"])
    with pytest.raises(ConfigError, match="no optimizer"):
        made().load_state_dict({name: value for name, value in state.items() if name != "optimizer"})


def test_a_checkpoint_is_told_of_every_step_and_asked_to_resume() -> None:
    class Told:
        def __init__(self) -> None:
            self.steps: list[int] = []

        def after_step(self, loop: perfagent.Loop) -> None:
            self.steps.append(loop.step_count)

        def resume(self, loop: perfagent.Loop) -> int:
            return loop.step_count

    told = Told()
    model = net()
    loop = perfagent.loop(model, sgd(model), grad_accum=2, checkpoint=told)
    assert loop.resume() == 0
    run(loop, batches_of([2] * 5))
    assert told.steps == [1, 2, 3]
    assert perfagent.loop(model, sgd(model)).resume() is None
