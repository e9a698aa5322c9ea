"""Memory that ran out, in all its forms: which memory it was, and the cure for that one."""

from __future__ import annotations

import pytest
from judging import frame, make_evaluator, state
from syrupy.assertion import SnapshotAssertion

from perfagent.wire import Finding

GPU = [
    "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
    "RuntimeError: CUDA driver error: out of memory",
    "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "RuntimeError: cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "std::bad_alloc: cudaErrorMemoryAllocation: out of memory",
    "HIP out of memory. Tried to allocate 2.00 GiB",
]


HOST = [
    "RuntimeError: [enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory: you tried",
    "RuntimeError: std::bad_alloc",
    "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 74.5 GiB for an array with shape (100000, 100000)",
    "MemoryError",
    "OSError: [Errno 12] Cannot allocate memory",
    "RuntimeError: DataLoader worker (pid 1) is killed by signal: Killed. ",
]


SHARED = [
    "RuntimeError: DataLoader worker (pid 1) is killed by signal: Bus error. It is possible that dataloader's workers are out of "
    "shared memory. Please try to raise your shared memory limit.",
    "RuntimeError: unable to allocate shared memory(shm) for file </torch_1_2_3>: No space left on device (28)",
]


NONE = [
    "ImportError: libgomp.so.1: cannot allocate memory in static TLS block",
    "RuntimeError: DataLoader worker (pid(s) 12) exited unexpectedly",
    "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 106496, Hardware limit: 101376.",
    "RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
]


@pytest.mark.parametrize("told", [GPU, HOST, SHARED], ids=["GPU", "host", "shared memory"])
def test_memory_that_ran_out_is_told_with_the_cure_for_it(told: list[str], words: SnapshotAssertion) -> None:
    found = [_ended("failed", exception=said.partition(":")[0], reason=said) for said in told]
    assert {one.rule for one in found} == {"oom_observed"}
    assert [one.message for one in found] == words
    [fix] = {one.fix for one in found}
    assert fix == words


def test_the_kernels_word_and_the_exception_before_decide_which() -> None:
    killed = _ended("oom", reason="killed by the kernel: the control group was out of memory")
    assert killed.message.startswith("Host memory ran out")
    trace = (
        f"torch.OutOfMemoryError: CUDA out of memory.\n\nDuring handling of it:\n{600 * 'x'}\nRuntimeError: step failed"
    )
    found = _ended("oom", exception="RuntimeError", reason="RuntimeError: step failed", traceback=trace)
    assert found.message.startswith("GPU memory ran out")


def _ended(name: str, used_gib: float | None = None, **data: object) -> Finding:
    judge = make_evaluator()
    memory = {} if used_gib is None else {"used": used_gib, "total": 100.0}
    readings = {f"host/memory_{what}_bytes": [gib * 2**30] for what, gib in memory.items()}
    judge.take(frame({"loss": [2.0], **readings}, [1]))
    (change,) = judge.take(frame({}, [], ident=2, events=[state(name, step=1, **data)]))
    return change.finding


@pytest.mark.parametrize(
    ("used_gib", "kills", "rule"),
    [(10, 0, "process_crash"), (10, 1, "oom_observed"), (10, None, "oom_observed"), (80, 0, "oom_observed"),
     (None, 0, "oom_observed")],
)  # fmt: skip
def test_a_worker_killed_in_a_host_with_room_is_no_oom(used_gib: float | None, kills: int | None, rule: str) -> None:
    found = _ended("failed", used_gib, exception="RuntimeError", reason=HOST[-1], traceback=HOST[-1], oom_kills=kills)
    assert (found.rule, found.cause == "worker killed") == (rule, rule == "process_crash")


def test_a_bus_error_names_shared_memory_first() -> None:
    found = _ended("failed", reason="crashed with SIGBUS")
    assert (found.rule, "/dev/shm" in found.fix) == ("process_crash", True)


@pytest.mark.parametrize("said", NONE)
def test_what_only_sounds_like_it_is_a_crash(said: str) -> None:
    assert _ended("failed", exception=said.partition(":")[0], reason=said).rule == "process_crash"
