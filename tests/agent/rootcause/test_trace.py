"""A profile's events become a table of operators, gaps of the device and shares of the time. Events of a GPU are written here in
the format of Kineto, torch's profiler."""

from __future__ import annotations

import gzip
import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch_versions import since_torch

from perfagent.rootcause import trace
from perfagent.rootcause.shares import shares

GPU = "DeviceType.CUDA"


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


def operators(*events: SimpleNamespace) -> dict[str, dict]:
    return {row["name"]: row for row in trace.operators(trace.record(events).cpu)}


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

    plain, packed = tmp_path / "t.json", tmp_path / "t.json.gz"
    recorded(train).export_chrome_trace(str(plain))
    trace.compress(plain, packed)
    text = gzip.decompress(packed.read_bytes()).decode()
    names = [event["name"] for event in json.loads(text)["traceEvents"]]
    assert "sk-abcdefghij" not in text
    assert any(name.startswith('stage "one" api_key=') for name in names)
    assert "aten::linear" in names


EVENTS = [
    event("aten::linear", 0, 100, correlation=1),
    event("aten::addmm", 10, 90, correlation=2),
    event("aten::relu", 100, 120, correlation=3),
    event("gemm_kernel", 50, 450, GPU, link=2),
    event("relu_kernel", 650, 700, GPU, link=3),
]


def test_device_time_is_that_of_the_operator_that_launched_it():
    rows = operators(*EVENTS)
    assert rows["aten::addmm"]["self_device_s"] == rows["aten::addmm"]["total_device_s"] == 400e-9
    assert (rows["aten::linear"]["self_device_s"], rows["aten::linear"]["total_device_s"]) == (0.0, 400e-9)
    assert (rows["aten::linear"]["self_cpu_s"], rows["aten::linear"]["total_cpu_s"]) == pytest.approx((20e-9, 100e-9))
    assert [name for _, _, name in trace.record(EVENTS).device] == ["gemm_kernel", "relu_kernel"]
    assert next(iter(rows)) == "aten::addmm", "the largest of the own times first, on whichever side"


def test_gaps_on_the_device_are_named_by_what_ran_around_them():
    cpu, device, _ = trace.record(EVENTS)
    found = trace.gaps(cpu, device, 1, 0, 1000)
    assert (found["of"], found["busy_s"], found["idle_pct"]) == ("device", 450e-9, 55.0)
    first, second, third = found["longest"]
    assert (first["s"], first["after"], first["before"]) == (300e-9, "relu_kernel", "the end")
    assert (second["s"], second["after"], second["before"]) == (200e-9, "gemm_kernel", "relu_kernel")
    assert (third["s"], third["after"]) == (50e-9, "the beginning")


def test_shares_of_a_device_tell_copies_by_direction():
    """And communication is that of its kernels."""
    records = trace.record([
        event("ProfilerStep#1", 0, 1000),
        event("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", 0, 100),
        event("aten::copy_", 100, 300),
        event("cudaStreamSynchronize", 150, 280, thread=4711),
        event("aten::mm", 300, 400),
        event("aten::mm", 350, 450, thread=2),
        event("Memcpy HtoD (Pageable -> Device)", 120, 220, GPU),
        event("gemm", 320, 520, GPU),
        event("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 420, 720, GPU),
        event("Memcpy DtoH (Device -> Pinned)", 800, 850, GPU),
        event("cudaDeviceSynchronize", 700, 900, thread=4711),
    ])  # fmt: skip
    taken = shares(records, 1, 0, 1000)
    found = {name: round(1e9 * seconds) for name, seconds in taken.items()}
    assert (found["h2d_s"], found["d2h_s"], found["d2d_s"]) == (100, 50, 0)
    assert (found["communication_s"], found["communication_alone_s"]) == (300, 200)
    assert found["device_wait_s"] == 130 + 200
    assert (found["loader_s"], found["operators_s"], found["outside_s"]) == (100, 350 + 200, 350)
