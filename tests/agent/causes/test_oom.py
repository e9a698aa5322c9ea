"""Memory that runs out for real, wherever a hook sees it pass; and on a GPU, behind a fake of torch.cuda's counters."""

from __future__ import annotations

import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import preloaded
import pytest
import torch
from agent.causes.conftest import Made
from agent_recorded import Recording
from builders import job_environment
from torch import nn

from perfagent_server.rules.causes.memory import plans

TOO_MUCH = 2**50


class Hungry(torch.autograd.Function):
    """Asks for more than there is, forward or backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, where: str) -> torch.Tensor:
        ctx.where = where
        return torch.empty(TOO_MUCH) if where == "forward" else x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return (torch.empty(TOO_MUCH) if ctx.where == "backward" else gradient), None


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_allocation_that_fails_is_told_and_raised_unchanged(train, where):
    job = train(Made(lambda self, x: Hungry.apply(self.linear(x), self.where), linear=nn.Linear(8, 4), where=""))
    job.steps(5)
    job.model.where = where
    with pytest.raises(RuntimeError, match="can't allocate memory") as raised:
        job.step()
    assert traceback.extract_tb(raised.value.__traceback__)[0].name.startswith("test_an_allocation")
    found = job.finding()
    assert (found["rule"], found["explains"]) == ("oom_observed", ["oom_observed"])
    evidence = found["evidence"]
    assert (evidence["step"], evidence["where"], evidence["device"]) == (6, where, "cpu")
    assert evidence["tried_bytes"] == 4 * TOO_MUCH
    weights = sum(p.numel() * 4 for p in job.model.parameters())
    assert evidence["categories"]["parameters"] == weights
    two_moments_and_a_count = 2 * weights + 4 * 2  # of each of two tensors
    assert evidence["categories"]["optimizer_state"] == two_moments_and_a_count
    assert evidence["host"]["rss_bytes"] > 2**20
    assert [entry["step"] for entry in evidence["last_steps"]][:4] == [1, 2, 3, 4]
    job.model.where = ""
    job.steps(3)  # it was caught
    assert len(job.losses) == 8
    assert job.finding() is found


def test_an_exception_raised_because_memory_ran_out_is_told(train):
    job = train()
    job.steps(5)
    with pytest.raises(ValueError, match="step failed") as raised:
        try:
            torch.empty(TOO_MUCH)
        except RuntimeError as inner:
            raise ValueError("step failed") from inner
    job.run.fail(raised.value)
    assert job.finding()["evidence"]["tried_bytes"] == 4 * TOO_MUCH
    assert job.recorded.sender.ended["state"] == "oom"


SCRIPT = """
import perfagent, torch
model = torch.nn.Linear(8, 4)
optimizer = torch.optim.AdamW(model.parameters())
perfagent.attach(model, optimizer)
for _ in range(5):
    optimizer.zero_grad()
    model(torch.randn(6, 8)).sum().backward()
    optimizer.step()
torch.empty(2**50)
"""


@pytest.mark.real
def test_a_process_that_memory_ends_past_our_hooks_tells_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    environment = job_environment(tmp_path, PERFAGENT_RECORD=str(tmp_path / "record"))
    (ended,) = preloaded.run([str(tmp_path / "train.py")], tmp_path, [environment])
    assert ended.returncode == 1
    assert "can't allocate memory" in ended.stderr
    recorded = Recording(tmp_path / "record")
    assert recorded.events("state")[-1]["state"] == "oom"
    (found,) = recorded.events("finding")
    assert found["evidence"]["where"] == "between steps"
    assert found["evidence"]["categories"]["parameters"] == 4 * (8 * 4 + 4)
    assert [entry["step"] for entry in found["evidence"]["last_steps"]] == [1, 2, 3, 4, 5]


# ---- the CUDA door


GIB = 2**30
MESSAGE = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 80.00 GiB of which 1.00 GiB is free."
)
BLOCKS = [{"state": "active_allocated", "size": 12 * GIB}, *({"state": "inactive", "size": n * GIB} for n in (5, 3))]
SEGMENT = {"device": 0, "total_size": 20 * GIB, "allocated_size": 12 * GIB, "blocks": BLOCKS}


def test_of_a_gpu_the_allocator_and_what_makes_room_are_told(train, monkeypatch):
    def snapshot(mempool_id=None, include_traces=True):
        assert not include_traces, "where the script records them, there are millions"
        return [SEGMENT, SEGMENT | {"device": 1}]

    held = {f"{name}_bytes": {"all": {"current": size * GIB}} for name, size in (("allocated", 70), ("reserved", 79))}
    for name, gives in (
        ("is_initialized", True), ("memory_stats_as_nested_dict", held), ("current_device", 0),
        ("get_device_properties", SimpleNamespace(total_memory=80 * GIB)),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda *_, gives=gives: gives)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", snapshot)
    job = train()
    error = torch.cuda.OutOfMemoryError(MESSAGE)
    job.watch.passing(error)
    job.watch.passing(error)
    evidence = job.finding()["evidence"]  # the same exception through a second hook is no second finding
    assert (evidence["device"], evidence["tried_bytes"], evidence["capacity_bytes"]) == ("cuda:0", 2 * GIB, 80 * GIB)
    assert evidence["allocator"]["allocated_bytes.all.current"] == 70 * GIB
    assert evidence["categories"]["activations_and_other"] == 70 * GIB, "the weights of this model lie on the CPU"
    (largest,) = evidence["largest_segments"]
    assert largest == {"total_bytes": 20 * GIB, "allocated_bytes": 12 * GIB, "largest_free_bytes": 5 * GIB}
    assert [(plan.name, plan.saves_bytes, plan.is_enough) for plan in plans(evidence)[:2]] == [
        ("fragmented", 9 * GIB, True), ("smaller_batch", 35 * GIB, True)
    ]  # fmt: skip


# ---- what allocators say


MMAP = "unable to mmap 400001605 bytes from file </w.pt>: Cannot allocate memory"
SAID = [
    (RuntimeError("MPS backend out of memory (MPS allocated: 1 GB). Tried to allocate 256.00 MB"), "mps", 256_000_000),
    (torch.OutOfMemoryError("XPU out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total"), "xpu:1", 2**31),
    (MemoryError(MMAP), "cpu", 400_001_605),
    (MemoryError("Unable to allocate 1.00 KiB in /data/RELATIONSHIPS/rows.py"), "cpu", 1024),
    (MemoryError("Unable to allocate 7.50 GiB for an array with shape (1,)"), "cpu", 15 * 2**29),
]


@pytest.mark.parametrize(("error", "device", "tried"), SAID, ids=["mps", "xpu", "mmap", "path", "numpy"])
def test_what_each_allocator_says_is_understood(train, error, device, tried):
    job = train()
    job.steps(2)
    job.watch.passing(error)
    found = job.finding()["evidence"]
    assert (found["device"], found["tried_bytes"]) == (device, tried)
