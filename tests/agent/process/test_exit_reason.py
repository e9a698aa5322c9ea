"""What an exception says about the end of a process."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from agent.causes.conftest import Made
from torch import nn
from torch._utils import KeyErrorMessage
from torch.testing._internal.distributed.fake_pg import FakeStore

from perfagent.process.exit_reason import cause, out_of_memory, unused_parameters


def test_error_of_a_loaders_worker_says_what_it_was() -> None:
    text = "Caught KeyError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\nKeyError: 'image'\n"
    error = KeyError(KeyErrorMessage(text))
    assert cause(error)[1] == "KeyError: Caught KeyError in DataLoader worker process 0. KeyError: 'image'"


def test_parameters_that_ddp_waited_for_are_named() -> None:
    """Two parts are unused, of which the frozen one has no number."""
    parts = {"frozen": nn.Linear(2, 2).requires_grad_(False), "body": nn.Linear(2, 2), "spare": nn.Linear(2, 2)}
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        model = nn.parallel.DistributedDataParallel(Made(lambda self, x: self.body(x), **parts))
        with pytest.raises(RuntimeError, match="finished reduction") as raised:
            for _ in range(2):
                model(torch.ones(1, 2)).sum().backward()
    finally:
        dist.destroy_process_group()
    assert unused_parameters(raised.value) == "spare.weight, spare.bias"
    assert unused_parameters(RuntimeError(str(raised.value))) == "", "of another process"
    model.module.named_parameters = lambda: model.module(None)  # a user's own, which fails
    assert unused_parameters(raised.value) == ""


WITHOUT_GUARD = """
import sys, torch
from perfagent.process.exit_reason import cause
sys.excepthook = lambda kind, error, trace: print(cause(error)[1])
next(iter(torch.utils.data.DataLoader([1, 2], num_workers=1, multiprocessing_context="spawn")))
"""


@pytest.mark.real
@pytest.mark.parametrize("more", ["", "# __main__"])
def test_a_spawned_worker_that_died_for_want_of_a_guard(more: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(WITHOUT_GUARD + more)
    ran = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert "exited unexpectedly" in ran.stdout
    assert ("which has no `if __name__" in ran.stdout) == (not more)


FULL = (
    "CUDA out of memory. Tried to allocate 2.00 GiB", "CUDA error: out of memory", "std::bad_alloc",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes",
    "[enforce fail] DefaultCPUAllocator: not enough memory: you tried to allocate 4 bytes.",
    "unable to mmap 400001605 bytes from file </tmp/weights.pt>: Cannot allocate memory (12)",
)  # fmt: skip


def test_full_memory_is_known_by_the_words_of_what_allocates() -> None:
    for text in FULL:
        assert out_of_memory(RuntimeError(text)), text
        assert not out_of_memory(ValueError(text)), "somebody talks about memory"
        wrapped = ValueError("the step failed")
        wrapped.__cause__ = RuntimeError(text)
        assert cause(wrapped)[0] == "oom"
    others = (
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED"),
        OSError(errno.ENOSPC, "No space left on device"),
    )
    assert [cause(error)[0] for error in others] == ["failed"] * 2
    assert cause(OSError(errno.ENOMEM, "Cannot allocate memory"))[0] == "oom"


def handles(error: Exception) -> BaseException:
    """Fails at something else while it deals with that."""
    with pytest.raises(LookupError) as caught:
        try:
            raise error
        except Exception:
            raise LookupError("in the handler")  # noqa: B904 - as a script does
    return caught.value


def test_error_in_a_handler_is_shown_after_what_it_handled() -> None:
    assert cause(handles(MemoryError("too much")))[0] == "oom"
    trace = cause(handles(ValueError("at first")))[3]
    first, second = trace.split("\n\nDuring handling of the above exception, another exception occurred:\n\n")
    assert first.splitlines()[-2:] == ["    raise error", "ValueError: at first"]
    assert second.splitlines()[-1] == "LookupError: in the handler"
