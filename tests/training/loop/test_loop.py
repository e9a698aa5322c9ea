"""One process: windows, precision, clipping, schedule, position and state of a loop."""

from __future__ import annotations

import copy
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
    IterableDataset,
    RandomSampler,
    Sampler,
    TensorDataset,
)

import perfagent
from perfagent.errors import ConfigError
from perfagent_loop.data.length_batches import PackedBatchSampler, TokenBudgetBatchSampler
from perfagent_loop.data.loader import resumable_loader
from perfagent_loop.data.packed_stream import PackedStream

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


class Short(list[Batch]):
    """Ends before its length."""

    def __len__(self) -> int:
        return 9


def step(loop: perfagent.Loop, batch: Batch, count: Any = None, *, times: float = 1.0) -> tuple[float, Any]:
    """The loss of one step, and what it did."""
    with loop.forward():
        loss = loss_of(loop.model, batch)
    loop.backward(loss * times, count)
    return loss.item(), loop.step()


def looped(**options: Any) -> perfagent.Loop:
    model = net()
    return perfagent.loop(model, sgd(model), **options)


def run(
    loop: perfagent.Loop, loader: Any, *, counts: str = "int", epochs: int | None = 1, **options: Any
) -> list[perfagent.StepResult]:
    count: Any = {"int": len, "tensor": lambda x: torch.tensor(len(x)), "none": lambda x: None}[counts]
    return [step(loop, batch, count(batch[0]))[1] for batch in loop.batches(loader, epochs, **options)]


@pytest.mark.parametrize("counts", ["int", "tensor", "items"])
@pytest.mark.parametrize("loader", [list, Stream], ids=["sized", "stream"])
def test_unequal_micro_batches_have_the_big_batch_s_gradient(counts: str, loader: Any) -> None:
    data = batches_of([4, 1, 7, 2, 3, 5, 6])  # windows of 3, 3 and 1
    loop = looped(grad_accum=3, clip_norm=0.3)
    if counts == "items":
        run(loop, loader(data), counts="none", epochs=2, items=lambda batch: len(batch[0]))
    else:
        run(loop, loader(data), counts=counts, epochs=2)
    assert loop.step_count == 6
    torch.testing.assert_close(flat(loop.model), big_batches(data, 3, clip=0.3, epochs=2), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("loader", [list, Stream, Short], ids=["sized", "stream", "short"])
def test_a_short_last_window_weighs_as_much_as_its_micro_steps(loader: Any) -> None:
    data, model = batches_of([4] * 5), net()
    optimizer = sgd(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    loop = perfagent.loop(model, optimizer, schedule, grad_accum=3)
    run(loop, loader(data), counts="none")
    assert loop.step_count == schedule.last_epoch == 2
    torch.testing.assert_close(flat(loop.model), big_batches(data, 3), rtol=1e-5, atol=1e-6)


def test_a_window_left_in_its_middle_is_thrown_away() -> None:
    data = batches_of([2, 3, 4, 5])
    loop = looped(grad_accum=2)
    step(loop, next(loop.batches(data[2:])))
    assert loop.micro_steps == 1
    run(loop, data[:2])
    torch.testing.assert_close(flat(loop.model), big_batches(data[:2], 2), rtol=1e-5, atol=1e-6)


def test_products_run_in_bf16_and_weights_stay_in_fp32() -> None:
    loop = looped(precision="bf16")
    x, y = batches_of([4])[0]
    with loop.forward():
        with loop.forward(), torch.no_grad():  # a teacher's, say
            loop.model(x)
        out = loop.model(x)
    loop.backward(nn.functional.mse_loss(out.float(), y))
    loop.step()
    assert out.dtype == torch.bfloat16
    assert all(parameter.dtype == torch.float32 for parameter in loop.model.parameters())
    assert loop.model(x).dtype == torch.float32, "autocast is off again"


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


@pytest.mark.parametrize("fused", [False, True])
def test_an_overflow_is_skipped_counted_and_halves_the_scale(fused: bool) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    loop = perfagent.loop(model, optimizer, schedule, precision="fp16", scaler=scaler, clip_norm=None)
    before, (first, second) = flat(model), batches_of([4, 4])
    result = step(loop, first, times=float("inf"))[1]
    assert (result.stepped, result.skipped) == (True, True)
    assert torch.equal(flat(model), before)
    result = step(loop, second)[1]
    assert (result.stepped, result.skipped) == (True, False)
    assert loop.step_count == 2
    assert scaler.get_scale() == 512.0
    if not fused:  # a fused optimizer tells only the device
        assert schedule.last_epoch == 1


def test_two_losses_have_a_loop_each() -> None:
    """A generator and its critic: neither steps, clears or counts what is the other's."""
    first, second = net(), net()
    one, two = perfagent.loop(first, sgd(first), grad_accum=2), perfagent.loop(second, sgd(second), clip_norm=1.0)
    data = batches_of([3, 3, 3, 3])
    for batch in one.batches(data):
        step(one, batch)
        with two.forward(last=True):
            other = loss_of(second, batch)
        two.backward(other)
        two.step()
    assert (one.step_count, two.step_count) == (2, 4)
    torch.testing.assert_close(flat(first), big_batches(data, 2), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(flat(second), big_batches(data, 1, clip=1.0), rtol=1e-5, atol=1e-6)


def test_nothing_is_read_of_the_norm_until_it_is_asked_for() -> None:
    [result] = run(looped(clip_norm=1e9), batches_of([4]))
    assert isinstance(result.grad_norm, Tensor)
    assert "not read" in repr(result)


def test_windows_count_their_items_for_all_micro_steps_or_none() -> None:
    loop, batch = looped(grad_accum=3), batches_of([2])[0]
    step(loop, batch, 2)
    with pytest.raises(ConfigError, match="for all or none"):
        step(loop, batch)


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


def train(loop: perfagent.Loop, data: Any, steps: int | None = None, *, one_by_one: bool = False) -> list[float]:
    """The losses of three epochs, or up to so many steps of the loop. one_by_one: each epoch is asked for."""
    asked = [1] * (3 - loop.epoch) if one_by_one else [3]
    return [
        step(loop, batch, len(batch[0]))[0] for epochs in asked for batch in loop.batches(data, epochs, steps=steps)
    ]


class OwnOrder(Sampler[int]):
    """Shuffles with a generator that no attribute called `generator` holds."""

    def __init__(self, rng: Any) -> None:
        self.rng = rng

    def __len__(self) -> int:
        return 22

    def __iter__(self) -> Iterator[int]:
        order = [*range(22)]
        self.rng.shuffle(order)
        return iter(order)


class Noisy(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        for index in range(24):
            yield torch.full((5,), index / 24) + 0.1 * torch.rand(5), torch.full((1,), random.random())


def pair_of(samples: list[Tensor]) -> Batch:
    return torch.cat(samples)[None, :5], torch.ones(1, 1)


def source(kind: str, seed: int) -> Any:
    """A loader; another process seeds its own generator in another way."""
    own, data = torch.Generator().manual_seed(seed), loader().dataset
    lengths = [number % 5 + 1 for number in range(22)]
    packed = PackedStream([torch.full((3,), number / 24) for number in range(24)], 9, window=8, collate=pair_of)
    make = {
        "shuffled": loader,
        "one by one": loader,
        "generator": lambda: loader(generator=own),
        "workers": lambda: loader(workers=2),
        "workers that stay": lambda: loader(workers=1, persistent_workers=True),
        "stream": lambda: DataLoader(Stream(batches_of([3] * 8)), batch_size=None),
        "noisy stream": lambda: DataLoader(Noisy(), batch_size=3),
        "batch sampler": lambda: DataLoader(
            data, batch_sampler=BatchSampler(RandomSampler(data, generator=own), 3, False)
        ),
        "numpy in a sampler": lambda: DataLoader(data, batch_size=3, sampler=OwnOrder(np.random.default_rng(seed))),
        "token budget": lambda: DataLoader(data, batch_sampler=TokenBudgetBatchSampler(lengths, 9)),
        "packed batches": lambda: DataLoader(data, batch_sampler=PackedBatchSampler(lengths, 9, window=8)),
        "resumable": lambda: resumable_loader(data, batch_size=3, shuffle=True, num_workers=0),
        "resumable workers": lambda: resumable_loader(data, batch_size=3, shuffle=True, num_workers=2),
        "resumable stream": lambda: resumable_loader(Stream(batches_of([3] * 8)), batch_size=None, num_workers=0),
        "packed stream": lambda: resumable_loader(packed, batch_size=None, num_workers=0),
        "packed stream in workers": lambda: resumable_loader(packed, batch_size=None, num_workers=2),
    }[kind]
    return make()


@pytest.mark.parametrize(
    ("kind", "stop"),  # in the middle of an epoch, at its end, after it
    [
        ("shuffled", 3), ("shuffled", 4), ("shuffled", 5), ("one by one", 3), ("one by one", 4),
        ("generator", 5), ("stream", 5), ("batch sampler", 3),
        ("numpy in a sampler", 3), ("noisy stream", 3), ("token budget", 5), ("packed batches", 5), ("resumable", 5),
        ("resumable stream", 3), ("packed stream", 3), pytest.param("workers", 3, marks=pytest.mark.real),
        pytest.param("workers that stay", 6, marks=pytest.mark.real),
        pytest.param("resumable workers", 3, marks=pytest.mark.real),
        pytest.param("packed stream in workers", 5, marks=pytest.mark.real),
    ],
)  # fmt: skip
def test_a_loop_that_was_stopped_goes_on_as_if_it_had_not_been(kind: str, stop: int) -> None:
    one_by_one = kind == "one by one"
    seed_all(1)
    whole = made()
    expected = train(whole, source(kind, 2), one_by_one=one_by_one)
    seed_all(1)
    first = made()
    begun = train(first, source(kind, 2), stop, one_by_one=one_by_one)
    state = copy.deepcopy(first.state_dict())
    seed_all(99)  # another process
    second = made()
    second.load_state_dict(state)
    assert second.step_count == stop
    assert begun + train(second, source(kind, 77), one_by_one=one_by_one) == expected
    assert torch.equal(flat(second.model), flat(whole.model))
    assert (second.step_count, second.epoch) == (whole.step_count, 3)


def test_a_loader_that_cannot_continue_exactly_says_so(caplog: pytest.LogCaptureFixture) -> None:
    first = made()
    train(first, loader(generator=torch.Generator()), 3)
    second = made()
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    train(second, loader(), 4)
    assert "random generators" in caplog.text


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


def test_a_state_taken_within_a_window_passes_over_no_batch() -> None:
    """After an exception: the loader is two batches ahead of the weights."""
    loop = looped(grad_accum=3)
    with pytest.raises(ZeroDivisionError):
        for number, batch in enumerate(loop.batches(Stateful())):
            step(loop, batch, times=1 if number < 4 else 0 // 0)
    state = loop.state_dict()
    assert set(state) == {"model", "optimizer", "scheduler", "scaler", "rng", "sampler", "loop"}
    assert {"step_count", "epoch", "run_id"} <= set(state["loop"])
    assert state["loop"]["batch"] == 3
    other = net()
    again = perfagent.loop(other, sgd(other), grad_accum=3)
    again.load_state_dict(state)
    run(again, Stateful())
    torch.testing.assert_close(flat(other), big_batches(batches_of([2] * 6), 3), rtol=1e-5, atol=1e-6)
