"""A profile's events become a table of operators, gaps of the device and shares of the time. Events of a GPU are written here in
the format of Kineto, torch's profiler."""

from __future__ import annotations

import gzip
import io
import json
import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from torch_versions import since_torch

from perfagent.causes import trace

GPU = "DeviceType.CUDA"
SLOW_S = 0.02


def event(
    name: str,
    start: int,
    end: int,
    device: str = "DeviceType.CPU",
    *,
    correlation: int = 0,
    link: int = 0,
    thread: int = 1,
) -> SimpleNamespace:
    """link: correlation of the operator that launched a kernel."""
    says: dict[str, object] = {
        "name": name, "start_ns": start, "end_ns": end, "start_thread_id": thread, "device_type": device, "is_async": False,
        "correlation_id": correlation, "linked_correlation_id": link, "is_python_function": ".py(" in name,
        "is_user_annotation": name.startswith(("ProfilerStep#", "enumerate(DataLoader)#")),
    }  # fmt: skip
    return SimpleNamespace(**{key: lambda value=value: value for key, value in says.items()})


def recorded(train) -> torch.profiler.profile:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        train()
    return profiler


def test_operator_times_are_those_of_torchs_own_table():
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 8))
    optimizer = torch.optim.AdamW(model.parameters())

    def train() -> None:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(16, 32)).square().mean().backward()
            optimizer.step()

    profiler = recorded(train)
    cpu, device, _ = trace.record(profiler.profiler.kineto_results.events())
    assert device == []
    ours = {row["name"]: row for row in trace.operators(cpu)}
    torchs = {row.key: row for row in profiler.key_averages()}
    assert len(ours) > 30
    for name, row in ours.items():
        assert row["calls"] == torchs[name].count, name
        assert row["self_cpu_s"] * 1e6 == pytest.approx(torchs[name].self_cpu_time_total, rel=1e-6, abs=1.0), name
        assert row["total_cpu_s"] * 1e6 >= row["self_cpu_s"] * 1e6 - 1.0


@since_torch(2, 11, "a quotation mark in a name breaks its JSON")
def test_what_a_user_named_goes_through_redaction(tmp_path):
    with torch.profiler.record_function("before"):
        pass
    named = torch.profiler.record_function('stage "one" api_key=sk-abcdefghijklmnopqrstuv')

    def train() -> None:
        with named:
            nn.Linear(4, 4)(torch.randn(2, 4))

    plain, packed = tmp_path / "t.json", io.BytesIO()
    recorded(train).export_chrome_trace(str(plain))
    trace.compress(plain, packed)
    text = gzip.decompress(packed.getvalue()).decode()
    names = [event["name"] for event in json.loads(text)["traceEvents"]]
    assert "sk-abcdefghij" not in text
    assert any(name.startswith('stage "one" api_key=') for name in names)
    assert "aten::linear" in names


def test_of_a_device_times_gaps_and_shares_are_told() -> None:
    """An operator has the time of the kernels that it launched; copies count by their direction, communication by its
    kernels."""
    events = [
        event("ProfilerStep#1", 0, 1000),
        event("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", 0, 100),
        event("aten::copy_", 100, 300, correlation=1),
        event("cudaStreamSynchronize", 150, 280, thread=4711),
        event("aten::linear", 290, 410, correlation=2),
        event("aten::mm", 300, 400, correlation=3),
        event("aten::mm", 350, 450, thread=2),
        event("Memcpy HtoD (Pageable -> Device)", 120, 220, GPU, link=1),
        event("gemm", 320, 520, GPU, link=3),
        event("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 420, 720, GPU),
        event("Memcpy DtoH (Device -> Pinned)", 800, 850, GPU),
        event("cudaDeviceSynchronize", 700, 900, thread=4711),
    ]
    records = trace.record(events)
    rows = {row["name"]: row for row in trace.operators(records.cpu)}
    assert (rows["aten::linear"]["self_device_s"], rows["aten::linear"]["total_device_s"]) == (0.0, 200e-9)
    assert (rows["aten::mm"]["self_device_s"], rows["aten::mm"]["calls"]) == (200e-9, 2)
    assert (rows["aten::linear"]["self_cpu_s"], rows["aten::linear"]["total_cpu_s"]) == pytest.approx((20e-9, 120e-9))
    gaps = trace.gaps(records.cpu, records.device, 1, 0, 1000)
    assert (gaps["of"], gaps["busy_s"], gaps["idle_pct"]) == ("device", 550e-9, 45.0)
    assert [(round(1e9 * gap["s"]), gap["before"]) for gap in gaps["longest"]] == [
        (150, ""), (120, "Memcpy HtoD (Pageable -> Device)"), (100, "gemm"), (80, "Memcpy DtoH (Device -> Pinned)")
    ]  # fmt: skip
    found = {name: round(1e9 * seconds) for name, seconds in trace.shares(records, 1, 0, 1000).items()}
    assert (found["h2d_s"], found["d2h_s"], found["d2d_s"]) == (100, 50, 0)
    assert (found["communication_s"], found["communication_alone_s"]) == (300, 200)
    assert found["device_wait_s"] == 130 + 200
    assert (found["loader_s"], found["operators_s"], found["outside_s"]) == (100, 350 + 200, 350)


def test_a_slow_loader_takes_the_time_that_it_needs() -> None:
    def slowly(items: list[torch.Tensor]) -> torch.Tensor:
        end = time.perf_counter() + SLOW_S
        while time.perf_counter() < end:
            pass
        return torch.stack(items)

    model, batches = nn.Linear(4, 4), iter(DataLoader(torch.randn(64, 4), batch_size=4, collate_fn=slowly))

    def train() -> None:
        for number in range(3):
            with torch.profiler.record_function(f"ProfilerStep#{number}"):
                model(next(batches)).sum().backward()

    records = trace.record(recorded(train).profiler.kineto_results.events())
    marks = [one for one in records.cpu if one.name.startswith("ProfilerStep#")]
    taken = trace.shares(records, marks[0].thread, marks[0].start, marks[-1].end)
    assert taken["loader_s"] >= 3 * SLOW_S / 2
    parts = taken["loader_s"] + taken["operators_s"] + taken["communication_alone_s"] + taken["outside_s"]
    assert parts == pytest.approx(taken["steps_s"], abs=1e-9)
