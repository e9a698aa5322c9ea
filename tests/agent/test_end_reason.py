"""What an exception says about the end of a process."""

from __future__ import annotations

import errno
from collections.abc import Callable

import pytest
from torch._utils import KeyErrorMessage

from perfagent.end_reason import cause, out_of_memory


def test_error_of_a_loaders_worker_says_what_it_was() -> None:
    text = "Caught KeyError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\nKeyError: 'image'\n"
    error = KeyError(KeyErrorMessage(text))
    assert cause(error)[1] == "KeyError: Caught KeyError in DataLoader worker process 0. KeyError: 'image'"


@pytest.mark.parametrize(
    "text",
    [
        "CUDA out of memory. Tried to allocate 2.00 GiB",
        "CUDA error: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes",
        "[enforce fail] DefaultCPUAllocator: not enough memory: you tried to allocate 4 bytes.",
        "unable to mmap 400001605 bytes from file </tmp/weights.pt>: Cannot allocate memory (12)",
        "std::bad_alloc",
    ],
)
def test_full_memory_is_known_by_the_words_of_what_allocates(text: str) -> None:
    assert out_of_memory(RuntimeError(text))
    assert not out_of_memory(ValueError(text)), "somebody talks about memory"
    wrapped = ValueError("the step failed")
    wrapped.__cause__ = RuntimeError(text)
    assert cause(wrapped)[0] == "oom"


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED"), "failed"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "oom"),
        (OSError(errno.ENOSPC, "No space left on device"), "failed"),
    ],
)
def test_other_errors_are_known_by_their_number(error: Exception, state: str) -> None:
    assert cause(error)[0] == state


def raised(by: Callable[[], object]) -> BaseException:
    with pytest.raises(Exception) as caught:
        by()
    return caught.value


def handles(error: Exception) -> None:
    """Fails at something else while it deals with that."""
    try:
        raise error
    except Exception:
        raise LookupError("in the handler")  # noqa: B904 - as a script does


def test_error_in_a_handler_is_shown_after_what_it_handled() -> None:
    assert cause(raised(lambda: handles(MemoryError("too much"))))[0] == "oom"
    trace = cause(raised(lambda: handles(ValueError("at first"))))[3]
    first, second = trace.split("\n\nDuring handling of the above exception, another exception occurred:\n\n")
    assert first.splitlines()[-2:] == ["    raise error", "ValueError: at first"]
    assert second.splitlines()[-1] == "LookupError: in the handler"
