"""`perfagent.find_batch_size`: the largest batch whose whole training step fits.

Doubling until it does not fit, then halving the gap. A forward pass alone would promise too much: the backward pass,
the gradients and the optimizer's state need most of the memory, and that state is only there from the second step on.
So a trial is a whole step, the first size is stepped twice, and the answer once more before it is given."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from perfagent.errors import ConfigError
from perfagent.samplers import cgroup
from perfagent_loop.checks import check_count
from perfagent_loop.collectives import all_reduce, world_of_job
from perfagent_loop.randomness import cuda_in_use
from perfagent_loop.search.trial_state import release_memory, restoring_state
from perfagent_loop.split_on_oom import is_out_of_memory

__all__ = ["BatchTrial", "HostMemory", "available_bytes", "find_batch_size", "search_batch_size"]

HOST_SHARE = 0.9
"""What a step may take of the available host memory: beyond it the kernel swaps or kills."""


@dataclass(frozen=True, slots=True)
class BatchTrial:
    """One size that was tried. fits: on all ranks. peak_bytes: of the device's allocator, or of the process on a CPU;
    None where it did not fit or cannot be read."""

    batch_size: int
    fits: bool
    peak_bytes: int | None


def find_batch_size(
    step: Callable[[int], Any], start: int = 1, limit: int = 4096, *, restore: Iterable[Any] = (), group: Any = None
) -> int:
    """Finds the largest batch size for which a whole training step fits into memory.

    Sizes are doubled until one does not fit, then the gap is halved. Ranks that search together get the same answer. On
    a CPU, no size is tried that would need more than 90 % of the free memory.

    Args:
        step: Runs one training step (forward, backward, optimizer) with a batch of the given size. Modules, optimizers,
            schedulers and scalers that it uses are restored afterwards, as are the random generators of Python, numpy
            and torch.
        start: The smallest size.
        limit: The largest size.
        restore: Further objects with `state_dict()` and `load_state_dict()` to restore.
        group: The ranks that search together, each of which calls this; all ranks by default.

    Raises:
        ConfigError: Even `start` does not fit, the step communicates between ranks, or a size is no whole number. Other
            errors of the step are raised as they are.
    """
    return search_batch_size(step, start, limit, restore=restore, group=group)[0]


def search_batch_size(
    step: Callable[[int], Any], start: int, limit: int, *, restore: Iterable[Any] = (), group: Any = None
) -> tuple[int, list[BatchTrial]]:
    """The answer, and what was tried on the way."""
    if not callable(step):
        raise ConfigError(f"step must be a function of a batch size that runs one step, not {type(step).__name__}")
    check_count("start", start, "a number of samples")
    check_count("limit", limit, "a number of samples")
    if limit < start:
        raise ConfigError(f"limit is {limit}, below start, which is {start}")
    with restoring_state(step, restore):
        search = _Search(step, group)
        if not search.fits(start, times=2):
            raise ConfigError(
                f"a step with a batch of {start} does not fit; use checkpointing, a lower precision or a smaller model "
                f"(`perfagent estimate` shows what takes the memory){'' if start == 1 else f', or start below {start}'}"
            )
        low, high = start, limit + 1
        while high - low > 1:
            size = min(2 * low, limit) if high > limit else (low + high) // 2
            if search.fits(size):
                low = size
            else:
                high = size
        while low > start and not search.fits(low, times=2):  # with memory as the training will find it
            low -= 1
    return low, search.trials


class _Search:
    def __init__(self, step: Callable[[int], Any], group: Any) -> None:
        self._step, self._group = step, group
        self.trials: list[BatchTrial] = []
        self._host = None if cuda_in_use() else HostMemory()

    def fits(self, size: int, *, times: int = 1) -> bool:
        failed, peak = True, None
        if self._host is None or not self._host.would_not_hold(size, HOST_SHARE):
            failed, peak = self._try(size, times)
        fits = not self._any(failed)
        self.trials.append(BatchTrial(size, fits, peak if fits else None))
        return fits

    def _try(self, size: int, times: int) -> tuple[bool, int | None]:
        """Whether memory ran out, and the peak."""
        if self._host is None:
            torch.cuda.reset_peak_memory_stats()
        else:
            self._host.begin()
        try:
            for _ in range(times):
                self._step(size)
            if self._host is None:
                torch.cuda.synchronize()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            at_fault: BaseException | None = error
            while at_fault is not None:  # the frames of a traceback hold the tensors that filled the memory
                at_fault.__traceback__ = None
                at_fault = at_fault.__cause__ or at_fault.__context__
            del error, at_fault
            release_memory()
            return True, None
        if self._host is None:
            self._host = None if cuda_in_use() else HostMemory()
            return False, torch.cuda.max_memory_allocated()
        return False, self._host.end(size)

    def _any(self, failed: bool) -> bool:
        """Whether any rank failed. A collective: every rank tries the same sizes in the same order."""
        if world_of_job() == 1 or dist.get_world_size(self._group) == 1:
            return failed
        device = "cuda" if dist.get_backend(self._group) == "nccl" else "cpu"
        flag = torch.full((), float(failed), device=device)
        all_reduce(flag, op=dist.ReduceOp.MAX, group=self._group)
        return bool(flag)


_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


class HostMemory:
    """Notes the peak of each trial. Where the system does not say (no Linux), it knows nothing and forbids nothing."""

    def __init__(self) -> None:
        self._before = 0
        self._took: dict[int, int] = {}

    def begin(self) -> None:
        """A trial begins: the kernel's mark of the peak goes down to what is resident now."""
        with suppress(OSError):
            _CLEAR.write_text("5")
        self._before = _kilobytes(_STATUS, "VmRSS") or 0

    def end(self, size: int) -> int | None:
        """The trial of a batch of this size fitted; the peak of the process in bytes."""
        peak = _kilobytes(_STATUS, "VmHWM")
        if peak is not None:
            self._took[size] = max(0, peak - self._before)
        return peak

    def would_not_hold(self, size: int, share: float) -> bool:
        """Whether a batch of this size would take more than this share, by the two largest that fitted."""
        room = available_bytes()
        if room is None or not self._took:
            return False
        known = sorted(self._took)[-2:]
        largest = self._took[known[-1]]
        each = largest / known[-1]
        if len(known) == 2:
            each = max(0.0, (largest - self._took[known[0]]) / (known[1] - known[0]))
        return largest + each * (size - known[-1]) > share * room


def available_bytes() -> int | None:
    """What the host and this process's control group have left without swapping; None where neither says."""
    found: list[int] = []
    if (of_host := _kilobytes(Path("/proc/meminfo"), "MemAvailable")) is not None:
        found.append(of_host)
    group = cgroup.find()
    if group is not None and group.limit_bytes is not None and group.limit_bytes < cgroup.UNLIMITED:
        used = group.used_bytes()
        if used is not None:
            found.append(max(0, group.limit_bytes - used))
    return min(found) if found else None


def _kilobytes(path: Path, name: str) -> int | None:
    """A line `name: 12 kB`, in bytes."""
    try:
        text = path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    match = re.search(rf"^{name}:\s*(\d+) kB", text, re.MULTILINE)
    return int(match[1]) * 1024 if match is not None else None
