"""The prefetcher: on the CPU it is the loader; what is read ahead, and what of it can be said without a GPU."""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from agent_recorded import Recording
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from whole_end import whole_end

import perfagent
from perfagent_loop.data.loader import resumable_loader
from perfagent_loop.data.prefetch import Prefetcher, read_ahead, timed
from perfagent_loop.data.transfer import CopyStream, moved

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


@pytest.mark.real
@pytest.mark.parametrize("workers", [0, 2])
def test_on_the_cpu_batches_are_the_loaders_own(workers: int) -> None:
    rows = TensorDataset(torch.arange(48.0).reshape(12, 4))
    prefetcher = Prefetcher(DataLoader(rows, batch_size=4, num_workers=workers), "cpu")
    assert len(prefetcher) == 3
    for _ in range(2):
        assert torch.equal(torch.cat([batch for (batch,) in prefetcher]), torch.arange(48.0).reshape(12, 4))
    made = [torch.zeros(2)]
    assert next(iter(Prefetcher(made, "cpu"))) is made[0]


def test_read_ahead_wait_and_batch_are_those_of_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path to a GPU, with batches that stay where they are: of 1, 2, 3 ... rows, and each takes a while."""
    took_s: list[float] = []

    def slow() -> Iterator[Tensor]:
        for rows in range(1, 7):
            begin = time.perf_counter()
            while time.perf_counter() < begin + 0.02:
                pass
            took_s.append(time.perf_counter() - begin)
            yield torch.ones(rows, 4)

    whole_end(monkeypatch)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = perfagent.attach(model, optimizer, record=tmp_path / "record")
    waited, sent = list[float](), list[Tensor]()
    ahead = read_ahead(slow(), lambda batch: sent.append(batch) or batch, 1)  # type: ignore[func-returns-value]
    reading, begin = timed(ahead), time.perf_counter()
    while (batch := next(reading, None)) is not None:
        waited.append(time.perf_counter() - begin)
        assert len(sent) == min(len(waited) + 1, 6), "the next one is on its way"
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        begin = time.perf_counter()
    run.finish()
    recording = Recording(tmp_path / "record")
    took = [sum(took_s[:2]), *took_s[2:], 0.0]  # in step n batch n + 1 is waited for
    for (_, wait), least, outside in zip(recording.series("phase/data_s"), took, waited, strict=True):
        assert least - 1e-4 <= wait <= outside + 1e-4
    seconds = dict(recording.series("step_time_s"))
    rows = {step: value * seconds[step] for step, value in recording.series("samples_per_s") if step in seconds}
    assert len(rows) >= 4
    assert all(round(value) == step for step, value in rows.items())


def test_the_state_of_a_loader_is_that_of_the_batch_in_hand() -> None:
    def prefetcher(ahead: int) -> Prefetcher[Any]:
        inner = resumable_loader(TensorDataset(torch.arange(8.0)), batch_size=2, num_workers=0)
        return Prefetcher(inner, "cpu", ahead=ahead)

    first, second = prefetcher(2), prefetcher(1)
    reading = first._through(lambda batch: batch, lambda batch: batch)
    seen = [next(reading)[0].tolist(), next(reading)[0].tolist()]
    second.load_state_dict(first.state_dict())
    assert seen + [batch.tolist() for (batch,) in second] == [[0, 1], [2, 3], [4, 5], [6, 7]]


@dataclasses.dataclass
class Graph:
    nodes: Tensor
    name: str


Pair = collections.namedtuple("Pair", ["x", "y"])


def test_tensors_are_found_in_whatever_holds_them() -> None:
    meta, one = torch.device("meta"), torch.ones(2)
    packed = nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    batch = {
        "a": one, "b": [one, (one, "text", 3)], "c": Pair(one, None), "d": Graph(one, "g"),
        "e": collections.OrderedDict(f=one),
    }  # fmt: skip
    there = moved(batch, meta)
    found = [there["a"], there["b"][0], there["b"][1][0], there["c"].x, there["d"].nodes, there["e"]["f"]]
    assert all(tensor.device == meta for tensor in found)
    assert there["b"][1][1:] == ("text", 3)
    assert [type(there[name]) for name in "cde"] == [Pair, Graph, collections.OrderedDict]
    assert batch["d"].nodes is one and batch["e"]["f"] is one  # the batch itself is as it was
    assert moved(packed, meta).batch_sizes.device.type == "cpu"  # a packed sequence moves itself


@needs_gpu
@pytest.mark.real
def test_batches_arrive_whole_while_the_gpu_computes() -> None:
    rows = torch.randn(4096, 1024)
    pinned = DataLoader(TensorDataset(rows), batch_size=256, num_workers=2, pin_memory=True)
    weight = torch.randn(1024, 1024, device="cuda")
    sums = []
    for (batch,) in Prefetcher(pinned, "cuda", ahead=2):
        held = batch
        for _ in range(20):
            held = (held @ weight).tanh()  # keeps the computing stream behind the copies
        sums.append(batch.double().sum())
    torch.testing.assert_close(torch.stack(sums).cpu(), rows.double().reshape(16, -1).sum(1))


@needs_gpu
def test_handing_over_does_not_wait_for_the_gpu() -> None:
    stream = CopyStream(torch.device("cuda", torch.cuda.current_device()))
    torch.cuda.set_sync_debug_mode("error")
    try:
        batch = stream.receive(stream.send({"x": torch.ones(1024).pin_memory(), "y": [torch.ones(2).pin_memory()]}))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert batch["x"].is_cuda and batch["y"][0].is_cuda
