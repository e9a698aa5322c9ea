"""How the time of profiled steps is divided: real profiles of a slow loader, of collectives and of copies."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from multiprocessing.synchronize import Semaphore
from pathlib import Path
from typing import Any

import pytest
import torch
from agent.rootcause.kineto import GPU, Fake
from process_groups import leave_group
from torch import nn
from torch.utils.data import DataLoader

from perfagent.rootcause import trace
from perfagent.rootcause.shares import sentences, shares

SLEEPS_S = 0.02


def slowly(asked: Semaphore, items: list[torch.Tensor]) -> torch.Tensor:
    asked.acquire()
    time.sleep(SLEEPS_S)
    return torch.stack(items)


def summary_of(step: Callable[[], object], steps: int = 3) -> dict[str, Any]:
    """What is told of a profile of some such steps, of this thread."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for number in range(steps):
            with torch.profiler.record_function(f"ProfilerStep#{number}"):
                step()
    records = trace.record(profiler.profiler.kineto_results.events())
    marks = [one for one in records.cpu if one.name.startswith("ProfilerStep#")]
    began, ended, thread = marks[0].start, marks[-1].end, marks[0].thread
    found = {
        "operators": trace.operators(records.cpu), "gaps": trace.gaps(records.cpu, records.device, thread, began, ended),
        "shares": shares(records, thread, began, ended), "first_step": 1, "last_step": steps,
    }  # fmt: skip
    return {**found, "says": sentences(found)}


def adds_up(found: dict[str, float]) -> bool:
    parts = found["loader_s"] + found["operators_s"] + found["communication_alone_s"] + found["outside_s"]
    return parts == pytest.approx(found["steps_s"], abs=1e-9)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_slow_loader_takes_the_time_that_it_sleeps(workers: int) -> None:
    model = nn.Linear(4, 4)
    asked = multiprocessing.Semaphore(0)
    data = DataLoader(torch.randn(64, 4), batch_size=4, collate_fn=partial(slowly, asked), num_workers=workers)
    batches = iter(data)

    def batch() -> torch.Tensor:
        asked.release()  # not earlier: else a worker would prepare the batch while this process trains
        found: torch.Tensor = next(batches)
        return found

    batch()
    found = summary_of(lambda: model(batch()).sum().backward())
    for _ in range(2):  # that a worker has begun meanwhile: it ends after them
        asked.release()
    taken = found["shares"]
    asleep = 3 if not workers else 1  # a worker sleeps through a pause of this process before next()
    assert taken["loader_s"] >= asleep * SLEEPS_S / 2
    assert adds_up(taken)
    assert "in the data loader" in found["says"][0]
    assert found["says"][0].startswith("Of "), found["says"]


LATE_S = 0.1


def join(store: Path, rank: int) -> torch.Tensor:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    return torch.ones(1000)


def late(store: Path, steps: int, first_comes: Semaphore) -> None:
    """The other rank, which comes to each collective late: so long after the first that comes to it now."""
    tensor = join(store, 1)
    for _ in range(steps):
        first_comes.acquire()
        time.sleep(LATE_S)
        torch.distributed.all_reduce(tensor)


def test_waiting_for_a_late_rank_is_communication_alone_and_what_runs_meanwhile_is_taken_off(tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    comes = fork.Semaphore(0)
    other = fork.Process(target=late, args=(tmp_path / "store", 6, comes))
    other.start()
    tensor = join(tmp_path / "store", 0)

    def wait() -> None:
        work = torch.distributed.all_reduce(tensor, async_op=True)
        comes.release()  # only now: a pause of this process before its collective would make the other less late
        work.wait()

    def compute() -> None:
        work = torch.distributed.all_reduce(tensor, async_op=True)
        comes.release()
        matrix = torch.randn(300, 300)
        while not work.is_completed():
            torch.mm(matrix, matrix)
        work.wait()

    try:
        waited, computed = summary_of(wait), summary_of(compute)
    finally:
        leave_group()
        other.join(20)
    for found in (waited, computed):
        assert found["shares"]["communication_s"] >= 3 * LATE_S * 0.9
        assert adds_up(found["shares"])
    assert waited["shares"]["communication_alone_s"] >= 3 * LATE_S * 0.9
    assert computed["shares"]["communication_alone_s"] < computed["shares"]["communication_s"] / 2
    assert any(one.startswith("Communication took ") for one in waited["says"])
    assert "in communication alone" in waited["says"][0]


def test_copies_are_told_by_what_was_copied_and_a_cast_is_one(tmp_path: Path) -> None:
    tensor, into = torch.randn(500_000), torch.empty(500_000, dtype=torch.float64)

    def step() -> None:
        into.copy_(tensor)
        tensor.to(torch.bfloat16)
        tensor.to(torch.float32)  # nothing to copy

    found = summary_of(step)
    rows = {row["name"]: row for row in found["operators"]}
    assert rows["aten::copy_"]["calls"] == 6
    assert found["shares"]["copies_s"] == pytest.approx(rows["aten::copy_"]["total_cpu_s"])
    assert any(one.startswith("Copies of tensors took ") for one in found["says"])


def test_what_takes_long_only_with_what_it_calls_is_listed_too() -> None:
    """Of a model with more kinds of operators than are listed."""
    most = trace.MOST_OPERATORS
    parts = [Fake(f"part {number}", 10 * number, 10 * number + 10) for number in range(most + 5)]
    rows = trace.operators(trace.record([Fake("all of it", 0, 10 * (most + 5)), *parts]).cpu)
    assert len(rows) == most + 1
    assert (rows[-1]["name"], rows[-1]["total_cpu_s"]) == ("all of it", pytest.approx(1050e-9))
    assert [row["self_cpu_s"] for row in rows[:-1]] == [10e-9] * most


# ---- the device: events as Kineto gives them


ON_A_DEVICE = [
    Fake("ProfilerStep#1", 0, 1000),
    Fake("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", 0, 100),
    Fake("aten::copy_", 100, 300),
    Fake("cudaStreamSynchronize", 150, 280, thread=4711),
    Fake("aten::mm", 300, 400),
    Fake("aten::mm", 350, 450, thread=2),
    Fake("Memcpy HtoD (Pageable -> Device)", 120, 220, GPU),
    Fake("gemm", 320, 520, GPU),
    Fake("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 420, 720, GPU),
    Fake("Memcpy DtoH (Device -> Pinned)", 800, 850, GPU),
    Fake("cudaDeviceSynchronize", 700, 900, thread=4711),
]


def test_on_a_device_copies_have_a_direction_and_communication_is_that_of_its_kernels() -> None:
    records = trace.record(ON_A_DEVICE)
    found = {name: round(1e9 * seconds) for name, seconds in shares(records, 1, 0, 1000).items()}
    assert (found["h2d_s"], found["d2h_s"], found["d2d_s"]) == (100, 50, 0)
    assert (found["communication_s"], found["communication_alone_s"]) == (300, 200)
    assert found["device_wait_s"] == 130 + 200
    assert (found["loader_s"], found["operators_s"], found["outside_s"]) == (100, 350 + 200, 350)
    summary = {
        "shares": shares(records, 1, 0, 1000), "gaps": trace.gaps(records.cpu, records.device, 1, 0, 1000),
        "operators": trace.operators(records.cpu), "first_step": 1, "last_step": 1,
    }  # fmt: skip
    said = sentences(summary)
    assert said[0].endswith("The device was idle for 45 % of it.")
    assert "(33 %) for the device" in said[1]
    assert said[3] == "Copies took 0.0001 ms (10 %) to the device and 5e-05 ms (5 %) from it."
