"""What an exception says about the end of a process."""

from __future__ import annotations

import errno

import pytest

from perfagent.ending import cause, out_of_memory, text_of


class UnspeakableError(RuntimeError):
    def __str__(self) -> str:
        return str(self.args[5])


class UntraceableError(ValueError):
    @property
    def __traceback__(self) -> None:  # type: ignore[override]
        raise OSError("not now")


def test_a_text_that_fails_is_replaced_by_the_name_of_the_type() -> None:
    error = UnspeakableError("mine")
    assert text_of(error) == "UnspeakableError"
    state, reason, exception, trace = cause(error)
    assert (state, reason, exception) == ("failed", "UnspeakableError", "UnspeakableError")
    assert trace.endswith("UnspeakableError: UnspeakableError")


def test_the_end_is_told_whatever_the_exception_does() -> None:
    assert cause(UntraceableError("mine")) == ("failed", "UntraceableError", "UntraceableError", "")


@pytest.mark.parametrize(
    "text",
    [
        "CUDA out of memory. Tried to allocate 2.00 GiB",
        "CUDA error: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes",
        "[enforce fail] DefaultCPUAllocator: not enough memory: you tried to allocate 4 bytes.",
        "unable to mmap 400001605 bytes from file </tmp/weights.pt>: Cannot allocate memory (12)",
        "std::bad_alloc",
    ],
)
def test_memory_that_ran_out_is_known_by_the_words_of_what_allocates(text: str) -> None:
    assert out_of_memory(RuntimeError(text))
    assert not out_of_memory(ValueError(text)), "somebody talks about memory"
    wrapped = ValueError("the step failed")
    wrapped.__cause__ = RuntimeError(text)
    assert cause(wrapped)[0] == "oom"


def test_other_errors_of_the_same_libraries_are_none() -> None:
    assert not out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED"))
    assert cause(RuntimeError("shapes cannot be multiplied"))[:2] == ("failed", "RuntimeError: shapes cannot be multiplied")


def test_memory_that_the_kernel_refused_is_known_by_the_number_of_the_error() -> None:
    assert cause(OSError(errno.ENOMEM, "Cannot allocate memory"))[0] == "oom"
    assert not out_of_memory(OSError(errno.ENOSPC, "No space left on device"))
