"""One process: windows, precision, clipping, schedule, position and state of a loop."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from agent_recorded import Recording
from big_batches import Batch, Stream, adamw, batches_of, big_batches, flat, loss_of, net
from resumable import batches, small_loop
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler

import perfagent
from perfagent_loop.data.length_batches import PackedBatchSampler, TokenBudgetBatchSampler
from perfagent_loop.data.loader import resumable_loader
from perfagent_loop.data.packed_stream import PackedStream


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
    return perfagent.loop(model, adamw(model), **options)


COUNTS: dict[str, Callable[[Tensor], Any]] = {"int": len, "tensor": lambda x: torch.tensor(len(x))}


@pytest.mark.parametrize(
    ("counts", "loader"),
    [
        ("int", list), ("int", Stream), ("tensor", list), ("tensor", Stream), ("items", list), ("items", Stream),
        ("none", list), ("none", Stream), ("none", Short),
    ],
)  # fmt: skip
def test_a_window_has_the_gradient_of_one_big_batch(counts: str, loader: Any) -> None:
    """A short last one, too. Without counts, micro-batches weigh alike."""
    data = batches_of([4] * 7 if counts == "none" else [4, 1, 7, 2, 3, 5, 6])  # windows of 3, 3 and 1
    model = net()
    optimizer = adamw(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    loop = perfagent.loop(model, optimizer, schedule, grad_accum=3, clip_norm=0.05)
    items = (lambda batch: len(batch[0])) if counts == "items" else None
    count = COUNTS.get(counts, lambda x: None)
    results = [step(loop, batch, count(batch[0]))[1] for batch in loop.batches(loader(data), 2, items)]
    weights, norms = big_batches([data], 3, clip=0.05, steps=6)
    assert loop.step_count == schedule.last_epoch == 6
    stepped = [result for result in results if result.stepped]
    assert all("not read" in repr(one) for one in stepped), "to show a result waits for no device"
    if loader is not Short:  # whose last windows are stepped by batches()
        assert [float(one.grad_norm) for one in stepped] == pytest.approx(norms, rel=1e-4)
    torch.testing.assert_close(flat(model), weights, rtol=1e-5, atol=1e-6)


def test_a_window_left_in_its_middle_is_thrown_away() -> None:
    data = batches_of([2, 3, 4, 5])
    loop = looped(grad_accum=2)
    step(loop, next(loop.batches(data[2:])))
    assert loop.micro_steps == 1
    for batch in loop.batches(data[:2]):
        step(loop, batch, len(batch[0]))
    torch.testing.assert_close(flat(loop.model), big_batches([data[:2]], 2, steps=1)[0], rtol=1e-5, atol=1e-6)


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


@pytest.mark.parametrize("fused", [False, True])
def test_fp16_trains_like_autocast_and_scaler_by_hand(fused: bool) -> None:
    """The first step overflows: it is skipped and counted, and halves the scale."""
    data = [*zip(batches_of([4, 3, 5]), (float("inf"), 1.0, 1.0), strict=True)]

    def made() -> tuple[nn.Module, torch.optim.Optimizer, Any, torch.amp.GradScaler]:
        optimizer = torch.optim.AdamW((model := net()).parameters(), lr=0.1, fused=fused)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return model, optimizer, schedule, torch.amp.GradScaler("cpu", init_scale=256.0)

    by_hand, optimizer, schedule, scaler = made()
    for batch, times in data:
        with torch.autocast("cpu", torch.float16):
            loss = loss_of(by_hand, batch)
        scaler.scale(loss * times).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(by_hand.parameters(), 0.2)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if fused or times == 1.0:  # a fused optimizer tells only the device
            schedule.step()
    model, optimizer, schedule, scaler = made()
    loop = perfagent.loop(model, optimizer, schedule, precision="fp16", clip_norm=0.2, scaler=scaler)
    results = [step(loop, batch, times=times)[1] for batch, times in data]
    assert [(one.stepped, one.skipped) for one in results] == [(True, True), (True, False), (True, False)]
    assert (loop.step_count, scaler.get_scale()) == (3, 128.0)
    assert torch.equal(flat(model), flat(by_hand))


def test_two_losses_have_a_loop_each() -> None:
    """A generator and its critic: neither steps, clears or counts what is the other's."""
    one, two = looped(grad_accum=2), looped(clip_norm=0.05)
    data = batches_of([3, 3, 3, 3])
    for batch in one.batches(data):
        step(one, batch)
        with two.forward(last=True):
            other = loss_of(two.model, batch)
        two.backward(other)
        two.step()
    assert (one.step_count, two.step_count) == (2, 4)
    for loop, window, clip in ((one, 2, float("inf")), (two, 1, 0.05)):
        right = big_batches([data], window, steps=loop.step_count, clip=clip)[0]
        torch.testing.assert_close(flat(loop.model), right, rtol=1e-5, atol=1e-6)


def test_a_run_has_the_loss_of_a_window_and_its_phases(tmp_path: Path) -> None:
    data, model = batches_of([1, 7, 3, 3]), net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    run = perfagent.attach(model, optimizer, record=tmp_path)
    loop = perfagent.loop(model, optimizer, grad_accum=2, clip_norm=1.0)
    for batch in loop.batches(DataLoader(Stream(data), batch_size=None)):
        step(loop, batch, len(batch[0]))
    run.finish()
    recording = Recording(tmp_path)
    means = [loss_of(model, (torch.cat([a, c]), torch.cat([b, d]))).item() for (a, b), (c, d) in (data[:2], data[2:])]
    assert recording.series("loss") == [(1, pytest.approx(means[0], rel=1e-6)), (2, pytest.approx(means[1], rel=1e-6))]
    phases = {f"phase/{name}_s" for name in ("data", "forward", "backward", "optimizer")}
    assert {"lr", "grad/norm", *phases} <= recording.names()


# ---- going on


def loader(workers: int = 0, **options: Any) -> DataLoader[Any]:
    return batches(22, batch_size=3, num_workers=workers, **options)


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def made(folder: Path | None = None, every: int | None = None) -> perfagent.Loop:
    return small_loop(folder, grad_accum=2, every=every, asynchronous=True)


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
            yield torch.full((4,), index / 24) + 0.1 * torch.rand(4), torch.full((2,), random.random())


def pair_of(samples: list[Tensor]) -> Batch:
    return torch.cat(samples)[None, :4], torch.ones(1, 2)


LENGTHS = [number % 5 + 1 for number in range(22)]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def packed(workers: int) -> Any:
    samples = [torch.full((3,), number / 24) for number in range(24)]
    stream = PackedStream(samples, 9, window=8, collate=pair_of)
    return resumable_loader(stream, batch_size=None, num_workers=workers)


def stream(make: Any, sizes: list[int]) -> Any:
    return make(Stream(batches_of(sizes)), batch_size=None, num_workers=0)


def by_batches(sampler: Any) -> DataLoader[Any]:
    return DataLoader(loader().dataset, batch_sampler=sampler)


def resumable(workers: int) -> Any:
    return resumable_loader(loader().dataset, batch_size=3, shuffle=True, num_workers=workers)


SOURCES: dict[str, tuple[Callable[[int], Any], tuple[int, ...]]] = {
    "shuffled": (lambda seed: loader(), (3, 4, 5)),  # in the middle of an epoch, at its end, after it
    "one by one": (lambda seed: loader(), (3, 4)),
    "generator": (lambda seed: loader(generator=seeded(seed)), (5,)),
    "stream": (lambda seed: stream(DataLoader, [3] * 8), (5,)),
    "noisy stream": (lambda seed: DataLoader(Noisy(), batch_size=3), (3,)),
    "batches": (
        lambda seed: by_batches(BatchSampler(RandomSampler(range(22), generator=seeded(seed)), 3, False)),
        (3,),
    ),
    "numpy": (lambda seed: DataLoader(loader().dataset, 3, sampler=OwnOrder(np.random.default_rng(seed))), (3,)),
    "token budget": (lambda seed: by_batches(TokenBudgetBatchSampler(LENGTHS, 9)), (5,)),
    "packed batches": (lambda seed: by_batches(PackedBatchSampler(LENGTHS, 9, window=8)), (5,)),
    "resumable": (lambda seed: resumable(0), (5,)),
    "resumable stream": (lambda seed: stream(resumable_loader, [3] * 8), (3,)),
    "packed stream": (lambda seed: packed(0), (3,)),
    "workers": (lambda seed: loader(2), (3,)),
    "workers that stay": (lambda seed: loader(1, persistent_workers=True), (6,)),
    "resumable workers": (lambda seed: resumable(2), (3,)),
    "packed stream in workers": (lambda seed: packed(2), (5,)),
}
"""A loader of each kind, and the steps at which it is stopped. seed: another process seeds its own generator in another
way."""


@pytest.mark.parametrize(
    ("kind", "stop"),
    [
        pytest.param(kind, stop, marks=[pytest.mark.real] if "workers" in kind else [])
        for kind, (_, stops) in SOURCES.items()
        for stop in stops
    ],
)
def test_a_loop_that_was_stopped_goes_on_as_if_it_had_not_been(tmp_path: Path, kind: str, stop: int) -> None:
    source, one_by_one = SOURCES[kind][0], kind == "one by one"
    whole = made()
    seed_all(1)
    expected = train(whole, source(2), one_by_one=one_by_one)
    first = made(tmp_path / "runs", every=stop)
    assert first.resume() is None
    seed_all(1)
    begun = train(first, source(2), stop, one_by_one=one_by_one)
    first.checkpoint.close()  # type: ignore[union-attr]
    seed_all(99)  # another process
    second = made(tmp_path / "runs")
    assert second.resume() == second.step_count == stop
    assert begun + train(second, source(77), one_by_one=one_by_one) == expected
    assert torch.equal(flat(second.model), flat(whole.model))
    assert (second.step_count, second.epoch) == (whole.step_count, 3)


def test_a_loader_that_cannot_continue_exactly_says_so(caplog: pytest.LogCaptureFixture) -> None:
    first, second = made(), made()
    train(first, loader(generator=torch.Generator()), 3)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    train(second, loader(), 4)
    assert "random generators" in caplog.text


def test_a_state_taken_within_a_window_passes_over_no_batch() -> None:
    """After an exception: the loader is two batches ahead of the weights."""
    loop, again = looped(grad_accum=3), looped(grad_accum=3)
    with pytest.raises(ZeroDivisionError):
        for number, batch in enumerate(loop.batches(stream(resumable_loader, [2] * 6))):
            step(loop, batch, times=1 if number < 4 else 0 // 0)
    state = loop.state_dict()
    assert set(state) == {"model", "optimizer", "scheduler", "scaler", "rng", "sampler", "loop"}
    assert {"step_count", "epoch", "run_id"} <= set(state["loop"])
    assert state["loop"]["batch"] == 3
    again.load_state_dict(state)
    for batch in again.batches(stream(resumable_loader, [2] * 6)):
        step(again, batch)
    torch.testing.assert_close(flat(again.model), big_batches([batches_of([2] * 6)], 3, steps=2)[0])
