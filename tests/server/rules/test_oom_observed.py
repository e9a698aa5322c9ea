"""Memory that ran out, in all its forms: which memory it was, and the cure for that one."""

from __future__ import annotations

import pytest
from judging import frame, make_evaluator, state

from perfagent.wire import Finding
from perfagent_server.rules.life.oom_observed import OomObserved
from perfagent_server.rules.speed.data_bound import DataBound

GPU = {
    "caching allocator": "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
    "driver": "RuntimeError: CUDA driver error: out of memory",
    "runtime": "torch.AcceleratorError: CUDA error: out of memory",
    "cublas": "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "cudnn": "RuntimeError: cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "thrust": "std::bad_alloc: cudaErrorMemoryAllocation: out of memory",
    "rocm": "HIP out of memory. Tried to allocate 2.00 GiB",
}
HOST = {
    "torch": "RuntimeError: [enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory: you tried to "
    "allocate 4 bytes. Error code 12 (Cannot allocate memory)",
    "C++": "RuntimeError: std::bad_alloc",
    "numpy": "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 74.5 GiB for an array with shape (100000, 100000)",
    "Python": "MemoryError",
    "system": "OSError: [Errno 12] Cannot allocate memory",
    "worker": "RuntimeError: DataLoader worker (pid 1) is killed by signal: Killed. ",
}
SHARED = {
    "worker": "RuntimeError: DataLoader worker (pid 1) is killed by signal: Bus error. It is possible that dataloader's workers "
    "are out of shared memory. Please try to raise your shared memory limit.",
    "file": "RuntimeError: unable to allocate shared memory(shm) for file </torch_1_2_3>: No space left on device (28)",
}


def _ended(name: str, **data: str) -> Finding:
    judge = make_evaluator()
    judge.take(frame({"loss": [2.0]}, [1]))
    (change,) = judge.take(frame({}, [], ident=2, events=[state(name, step=1, **data)]))
    return change.finding


@pytest.mark.parametrize("words", GPU.values(), ids=GPU)
def test_a_gpu_without_memory_is_told_as_one(words: str) -> None:
    found = _ended("failed", exception=words.partition(":")[0], reason=words)
    assert found.rule == "oom_observed"
    assert found.message.startswith("GPU memory ran out on rank 0")
    assert found.fix == OomObserved.english.remedies[""]


@pytest.mark.parametrize("words", HOST.values(), ids=HOST)
def test_a_host_without_memory_is_told_as_one_and_gets_no_cure_for_a_gpu(words: str) -> None:
    found = _ended("failed", exception=words.partition(":")[0], reason=words)
    assert found.rule == "oom_observed"
    assert found.message.startswith("Host memory")
    assert ("most likely" in found.message) == ("killed by signal" in words)
    for word in ("workers", "prefetch_factor", "limit"):
        assert word in found.fix
    for word in ("mixed precision", "CUDA", "batch size"):
        assert word not in found.fix


def test_what_the_kernel_killed_for_the_control_group_gets_the_host_s_cure() -> None:
    found = _ended("oom", reason="killed by the kernel: the control group was out of memory")
    assert found.message.startswith("Host memory ran out")
    assert "limit of the container" in found.fix


def test_an_exception_that_came_of_another_is_of_the_memory_that_the_other_names() -> None:
    trace = (
        "torch.OutOfMemoryError: CUDA out of memory.\n\nDuring handling of it:\n"
        + 600 * "x"
        + "\nRuntimeError: step failed"
    )
    found = _ended("oom", exception="RuntimeError", reason="RuntimeError: step failed", traceback=trace)
    assert found.message.startswith("GPU memory ran out")


@pytest.mark.parametrize("words", SHARED.values(), ids=SHARED)
def test_shared_memory_that_is_full_is_told_with_what_makes_it_larger(words: str) -> None:
    found = _ended("failed", exception="RuntimeError", reason=words)
    assert found.rule == "oom_observed"
    assert "shared memory" in found.message
    for word in ("--shm-size", "--ipc=host", "workers"):
        assert word in found.fix


def test_a_bus_error_names_shared_memory_first() -> None:
    found = _ended("killed", reason="killed by SIGBUS")
    assert found.rule == "process_crash"
    assert "/dev/shm" in found.fix


@pytest.mark.parametrize(
    "words",
    [
        "ImportError: libgomp.so.1: cannot allocate memory in static TLS block",
        "RuntimeError: DataLoader worker (pid(s) 12) exited unexpectedly",
        "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 106496, Hardware limit: 101376.",
        "RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    ],
)  # fmt: skip
def test_what_only_sounds_like_it_is_a_crash(words: str) -> None:
    assert _ended("failed", exception=words.partition(":")[0], reason=words).rule == "process_crash"


def test_pinned_memory_is_recommended_for_gpus_and_workers_where_there_are_none() -> None:
    fix = DataBound.english.remedies[""]
    assert "on a GPU pin_memory=True" in fix
    assert "num_workers=0, its default" in fix
