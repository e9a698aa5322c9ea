"""How the time of profiled steps is divided: real profiles of a slow loader and of copies."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from perfagent.rootcause import trace
from perfagent.rootcause.shares import shares

SLOW_S = 0.02


def slowly(items: list[torch.Tensor]) -> torch.Tensor:
    end = time.perf_counter() + SLOW_S
    while time.perf_counter() < end:
        pass
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
    return {
        "operators": trace.operators(records.cpu), "gaps": trace.gaps(records.cpu, records.device, thread, began, ended),
        "shares": shares(records, thread, began, ended), "first_step": 1, "last_step": steps,
    }  # fmt: skip


def test_a_slow_loader_takes_the_time_that_it_needs() -> None:
    model = torch.nn.Linear(4, 4)
    batches = iter(DataLoader(torch.randn(64, 4), batch_size=4, collate_fn=slowly))
    found = summary_of(lambda: model(next(batches)).sum().backward())
    taken = found["shares"]
    assert taken["loader_s"] >= 3 * SLOW_S / 2
    parts = taken["loader_s"] + taken["operators_s"] + taken["communication_alone_s"] + taken["outside_s"]
    assert parts == pytest.approx(taken["steps_s"], abs=1e-9)


def test_copies_are_told_by_what_was_copied_and_a_cast_is_one() -> None:
    tensor, into = torch.randn(500_000), torch.empty(500_000, dtype=torch.float64)

    def step() -> None:
        into.copy_(tensor)
        tensor.to(torch.bfloat16)
        tensor.to(torch.float32)  # nothing to copy

    found = summary_of(step)
    rows = {row["name"]: row for row in found["operators"]}
    assert rows["aten::copy_"]["calls"] == 6
    assert found["shares"]["copies_s"] == pytest.approx(rows["aten::copy_"]["total_cpu_s"])
