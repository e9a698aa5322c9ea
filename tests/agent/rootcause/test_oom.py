"""Memory that runs out for real, wherever a hook sees it pass; and on a GPU, behind a fake of torch.cuda's counters."""

from __future__ import annotations

import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import preloaded
import pytest
import torch
from agent_recorded import Recording
from builders import job_environment
from quantized import InEightBits
from torch import nn

TOO_MUCH = 2**50


class Hungry(torch.autograd.Function):
    """Asks for more than there is, forward or backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, where: str) -> torch.Tensor:  # type: ignore[override]
        ctx.where = where
        return torch.empty(TOO_MUCH) if where == "forward" else x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return (torch.empty(TOO_MUCH) if ctx.where == "backward" else gradient), None


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)
        self.where = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Hungry.apply(self.linear(x), self.where)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_allocation_that_fails_is_looked_into_and_raised_unchanged(train, where):
    job = train(Model())
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
    sizes = evidence["categories"]
    weights = sum(p.numel() * 4 for p in job.model.parameters())
    assert sizes["parameters"] == weights
    assert sizes["optimizer_state"] == 2 * weights + 4 * 2, "two moments and a step count for each of two tensors"
    assert evidence["host"]["rss_bytes"] > 2**20
    assert [entry["step"] for entry in evidence["last_steps"]][:4] == [1, 2, 3, 4]
    assert evidence["remedies"][0]["do"].startswith("Look at the line that asks for 4 PiB: in all there are ")
    assert evidence["remedies"][1]["do"].startswith("Halve the batch size")
    told = f"In step 6 an allocation of 4 PiB of host memory failed in {where}; this process has "
    assert found["message"].startswith(told), "what is known by name is a small part on a CPU"


def test_one_that_is_caught_lets_training_go_on(train):
    job = train(Model())
    job.steps(3)
    job.model.where = "backward"
    with pytest.raises(RuntimeError):
        job.step()
    job.model.where = ""
    job.steps(3)
    assert len(job.losses) == 6
    assert len(job.events("finding")) == 1


def test_other_exceptions_are_none_of_its_business(train):
    job = train()
    job.steps(3)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        job.step(torch.randn(6, 9))
    assert job.events("finding") == []


class UnspeakableError(RuntimeError):
    """Its own text cannot be had."""

    def __str__(self) -> str:
        return str(self.args[5])


def test_an_exception_whose_text_fails_reaches_the_script_as_it_is(train):
    job = train()
    job.steps(3)
    job.model.blocks[0].act.register_forward_hook(raising(UnspeakableError("mine")))
    with pytest.raises(UnspeakableError):
        job.step()
    assert job.events("finding") == []


def raising(error: BaseException) -> Any:
    def hook(*_: Any) -> None:
        raise error

    return hook


def test_each_that_is_caught_counts_three_are_looked_into_and_the_one_that_ends_the_run_is(train):
    """Exceptions of which each is gone before the next is made mostly have one id()."""
    job = train()
    look = job.run._investigator

    def caught() -> int:
        error = RuntimeError("CUDA error: out of memory")
        look.passing(error)
        look.passing(error)  # on its way out it passes several hooks
        return id(error)

    assert len({caught() for _ in range(12)}) < 12
    last = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    look.passing(last)
    look.ended_by(last)
    look.ended_by(last)
    assert [found["evidence"]["number"] for found in job.events("finding")] == [1, 2, 3, 13]


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


def test_one_that_passes_no_hook_is_looked_into_at_the_end_and_the_state_is_oom(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    environment = job_environment(tmp_path, PERFAGENT_RECORD=str(tmp_path / "record"))
    [done] = preloaded.run([str(tmp_path / "train.py")], tmp_path, [environment])
    assert done.returncode == 1
    assert "can't allocate memory" in done.stderr
    recording = Recording(tmp_path / "record")
    assert recording.events("state")[-1]["state"] == "oom"
    (found,) = recording.events("finding")
    assert found["evidence"]["where"] == "between steps"
    assert found["evidence"]["categories"]["parameters"] == 4 * (8 * 4 + 4)


UNSPEAKABLE = """
import perfagent
class UnspeakableError(RuntimeError):
    def __str__(self):
        return self.args[5]
perfagent.init(project="p")
raise UnspeakableError("mine")
"""


def test_a_process_that_ends_by_an_exception_whose_text_fails_tells_its_end(tmp_path: Path) -> None:
    import subprocess
    import sys

    environment = job_environment(tmp_path, PERFAGENT_RECORD=str(tmp_path / "record"))
    done = subprocess.run(
        [sys.executable, "-c", UNSPEAKABLE], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1
    assert "atexit" not in done.stderr
    ended = Recording(tmp_path / "record").events("state")[-1]
    assert (ended["state"], ended["reason"]) == ("failed", "UnspeakableError")


# ---- the CUDA door


STATS = {
    "allocated_bytes.all.current": 70 * 2**30, "allocated_bytes.all.peak": 75 * 2**30, "reserved_bytes.all.current": 79 * 2**30,
    "active_bytes.all.current": 70 * 2**30, "inactive_split_bytes.all.current": 8 * 2**30, "num_alloc_retries": 3, "num_ooms": 1,
}  # fmt: skip
MESSAGE = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 80.00 GiB of which 1.00 GiB is free. "
    "Of the allocated memory 70.00 GiB is allocated by PyTorch, and 9.00 GiB is reserved by PyTorch but unallocated."
)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    segment = {
        "device": 0, "total_size": 20 * 2**30, "allocated_size": 12 * 2**30,
        "blocks": [{"state": "active_allocated", "size": 12 * 2**30}, {"state": "inactive", "size": 5 * 2**30},
                   {"state": "inactive", "size": 3 * 2**30}],
    }  # fmt: skip
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda _device: STATS)

    def snapshot(mempool_id=None, include_traces=True):
        assert not include_traces, "where the script records them, there are millions"
        return [segment, segment | {"device": 1}]

    monkeypatch.setattr(torch.cuda, "memory_snapshot", snapshot)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: SimpleNamespace(total_memory=80 * 2**30))


def test_on_a_gpu_it_says_what_the_allocator_holds_and_what_would_make_room(train, gpu):
    job = train()
    error = torch.cuda.OutOfMemoryError(MESSAGE)
    job.run._investigator.passing(error)
    job.run._investigator.passing(error)
    found = job.finding()  # the same exception through a second hook is no second finding
    evidence = found["evidence"]
    assert (evidence["device"], evidence["tried_bytes"], evidence["capacity_bytes"]) == (
        "cuda:0",
        2 * 2**30,
        80 * 2**30,
    )
    assert evidence["allocator"] == STATS
    assert evidence["categories"]["activations_and_other"] == 70 * 2**30, "the weights of this model lie on the CPU"
    assert evidence["largest_segments"] == [
        {"total_bytes": 20 * 2**30, "allocated_bytes": 12 * 2**30, "largest_free_bytes": 5 * 2**30}
    ]
    first, second = evidence["remedies"][:2]
    assert "expandable_segments" in first["do"]
    assert (first["saves_bytes"], first["enough"]) == (9 * 2**30, True)
    assert second["do"].startswith("Halve the batch size")
    assert second["saves_bytes"] == 35 * 2**30
    assert "1. Set PYTORCH_CUDA_ALLOC_CONF" in found["fix"]


def test_a_torch_whose_snapshot_always_has_traces_is_not_asked_for_one(train, gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda mempool_id=None: pytest.fail("it may take minutes"))
    job = train()
    job.run._investigator.passing(torch.cuda.OutOfMemoryError(MESSAGE))
    assert job.finding()["evidence"]["allocator"] == STATS


def on_gpu(index: int, size: int) -> Any:
    """What is asked of a tensor there."""
    storage = SimpleNamespace(data_ptr=lambda: 1 + index, nbytes=lambda: size)
    return SimpleNamespace(device=torch.device("cuda", index), layout=torch.strided, untyped_storage=lambda: storage)


@pytest.mark.parametrize("message", [MESSAGE, "CUDA error: out of memory"], ids=["with its number", "the current one"])
def test_what_lies_on_another_gpu_is_not_what_filled_this_one(train, gpu, monkeypatch, message):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    job = train(Model())
    job.model.linear.weight._local_tensor = on_gpu(0, 50 * 2**30)
    job.model.linear.bias._local_tensor = on_gpu(1, 60 * 2**30)
    job.run._investigator.passing(RuntimeError(message))
    assert job.finding()["evidence"]["categories"] == {"parameters": 50 * 2**30, "activations_and_other": 20 * 2**30}


def test_the_state_of_every_optimizer_counts_in_whatever_form_it_is_kept(train):
    job = train(Model())
    beside = torch.optim.SGD(nn.Linear(10, 10).parameters(), lr=0.1, momentum=0.9)
    for parameter in beside.param_groups[0]["params"]:
        parameter.grad = torch.zeros_like(parameter)
    job.steps(2)
    beside.step()
    job.steps(1)
    weight, bias = job.model.linear.weight, job.model.linear.bias
    job.optimizer.state[weight] = {name: InEightBits(*weight.shape, scales=1) for name in ("exp_avg", "exp_avg_sq")}
    job.optimizer.state[bias] = {"history": {"old": [torch.zeros(100), torch.zeros(100)]}}
    job.model.later = nn.LazyLinear(3)  # has no size yet
    job.run._investigator.passing(MemoryError())
    sizes = job.finding()["evidence"]["categories"]
    assert sizes["optimizer_state"] == 2 * (weight.numel() + 4) + 2 * 400 + 4 * 110
    assert sizes["parameters"] == 4 * (weight.numel() + bias.numel() + 110)


def test_a_sparse_gradient_counts_with_its_numbers_and_their_places(train):
    job = train(Model())
    job.model.linear.weight.grad = torch.eye(4, 8).to_sparse()
    job.run._investigator.passing(MemoryError())
    assert job.finding()["evidence"]["categories"]["gradients"] == 4 * 4 + 2 * 4 * 8


@pytest.mark.parametrize("near", [True, False])
def test_a_limit_of_addresses_is_told_where_it_was_what_ran_out(train, near):
    """`ulimit -v`, as some clusters set it: 19 GB were free, and 40 MB could not be had. Others set one that is never
    reached."""
    import resource

    job = train(Model())
    job.steps(2)
    before = resource.getrlimit(resource.RLIMIT_AS)
    [taken] = (
        int(line.split()[1])
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmSize:")
    )
    limit = 1024 * taken * 100 // 95 if near else 2**46
    resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    try:
        job.run._investigator.passing(MemoryError())
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    found = job.finding()
    assert abs(found["evidence"]["host"]["address_limit_bytes"] - limit) < resource.getpagesize()
    assert ("of addresses that it may have (ulimit -v)" in found["message"]) == near
    assert found["fix"].startswith("1. Lift the limit of addresses") == near


def test_a_limit_of_addresses_is_told_where_the_host_had_more_to_give_than_it_left(train):
    """A `bytearray` of half a gigabyte: Python does not say how much it asked for."""
    import resource

    job = train(Model())
    job.steps(2)
    before = resource.getrlimit(resource.RLIMIT_AS)
    [taken] = (
        int(line.split()[1])
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmSize:")
    )
    resource.setrlimit(resource.RLIMIT_AS, (1024 * taken + 2**28, before[1]))
    try:
        with pytest.raises(MemoryError) as raised:
            bytearray(2**29)
        job.run._investigator.passing(raised.value)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    found = job.finding()
    assert found["message"].startswith("In step 3 an allocation of host memory failed; this process has ")
    assert "of addresses that it may have (ulimit -v)" in found["message"]
    assert found["fix"].startswith("1. Lift the limit of addresses")


class Heavy(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, place: int) -> torch.Tensor:
        return torch.empty(TOO_MUCH if place == 5 else 4)


def test_what_a_loader_worker_asked_for_is_not_laid_at_the_model(train):
    job = train(Model())
    job.steps(2)
    with pytest.raises(RuntimeError, match="Caught RuntimeError in DataLoader worker process 1") as raised:
        list(torch.utils.data.DataLoader(Heavy(), batch_size=1, num_workers=2))
    job.run.fail(raised.value)
    found = job.finding()
    assert "4 PiB of host memory failed in DataLoader worker 1; the training process has " in found["message"]
    assert found["evidence"]["worker"] == 1
    assert "num_workers" in found["fix"]
    assert "mixed precision" not in found["fix"]
    assert "Checkpoint activations" not in found["fix"]


def test_remedies_that_are_enough_come_first_and_name_only_what_applies():
    from perfagent.rootcause.oom import remedies

    weights = {"parameters": 10, "gradients": 10, "optimizer_state": 20}
    plans = remedies(weights | {"activations_and_other": 4}, dtypes={"bfloat16"}, world_size=4, tried=16)
    assert plans[0]["do"].startswith("Shard parameters")
    assert (plans[0]["saves_bytes"], plans[0]["enough"]) == (30, True)
    assert [plan.get("enough") for plan in plans] == [True, False, False, False]
    assert not any("mixed precision" in plan["do"] for plan in plans), "it is trained in bf16 already"
    assert not any("Shard" in plan["do"] for plan in remedies(weights)), "there is one rank"


def test_an_exception_that_was_raised_because_memory_ran_out_is_looked_into_at_the_end(train):
    job = train()
    job.steps(5)
    caught: Exception | None = None
    try:
        try:
            torch.empty(TOO_MUCH)
        except RuntimeError as inner:
            raise ValueError("step failed") from inner
    except ValueError as error:
        caught = error
    assert caught is not None
    job.run.fail(caught)
    assert job.finding()["evidence"]["tried_bytes"] == 4 * TOO_MUCH
    assert job.recorded.sender.ended["state"] == "oom"


@pytest.mark.parametrize(
    ("error", "device", "tried", "said"),
    [
        (
            RuntimeError("MPS backend out of memory (MPS allocated: 1 GB). Tried to allocate 256.00 MB"),
            "mps",
            256_000_000,
            "GPU",
        ),
        (
            torch.OutOfMemoryError("XPU out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total"),
            "xpu:1",
            2**31,
            "GPU",
        ),
        (
            MemoryError("unable to mmap 400001605 bytes from file </w.pt>: Cannot allocate memory"),
            "cpu",
            400_001_605,
            "host",
        ),
        (MemoryError("Unable to allocate 7.50 GiB for an array with shape (1,)"), "cpu", 15 * 2**29, "host"),
    ],
)
def test_what_each_allocator_says_is_understood(train, error, device, tried, said):
    job = train()
    job.steps(2)
    job.run._investigator.passing(error)
    evidence = job.finding()["evidence"]
    assert (evidence["device"], evidence["tried_bytes"]) == (device, tried)
    size = {256_000_000: "244 MiB", 2**31: "2 GiB", 400_001_605: "381 MiB", 15 * 2**29: "7.5 GiB"}[tried]
    assert job.finding()["message"].startswith(f"In step 3 an allocation of {size} of {said} memory failed")


def test_of_the_hosts_memory_what_a_script_keeps_of_every_step_comes_before_the_batch():
    """No smaller batch helps a list of losses that keep their graphs."""
    from perfagent.rootcause.oom import remedies

    first, second, *_ = [plan["do"] for plan in remedies({"parameters": 4}, on_device=False, tried=16, capacity=64)]
    assert "kept of every step" in first
    assert second.startswith("Halve the batch size")
    assert not any("every step" in plan["do"] for plan in remedies({"parameters": 4}, tried=16, capacity=64))
    too_large = remedies({"parameters": 4}, on_device=False, tried=65, capacity=64)
    assert not any("every step" in plan["do"] for plan in too_large), "one such allocation fits nowhere"
