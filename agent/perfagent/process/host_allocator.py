"""Keeps glibc from giving the memory of every training step back to the kernel.

glibc returns the top of the heap to the kernel whenever it is larger than its trim threshold, and the next step takes a page
fault for every 4 KiB of it: 1,200 faults and up to 3 ms more in a CPU step of 5 ms (benchmarks/overhead/heap.py). Any change
of the heap can start it, `attach` included. The two thresholds below are the largest that glibc's own adjustment can reach,
so the process keeps no memory that glibc might not have kept by itself.

Set in this process by mallopt(3), never through the environment, which every child would inherit. There is no way back:
glibc reports neither its thresholds nor whether it still adjusts them. Whoever has set the allocator himself keeps his
settings.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

__all__ = ["reason_against", "tune"]

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
MMAP_THRESHOLD = 32 * 2**20  # DEFAULT_MMAP_THRESHOLD_MAX of glibc on 64-bit systems
TRIM_THRESHOLD = 2 * MMAP_THRESHOLD  # what glibc derives from it
_DONE = "tuned: mmap threshold 32 MiB, trim threshold 64 MiB"
_VARIABLES = (
    "MALLOC_ARENA_MAX", "MALLOC_ARENA_TEST", "MALLOC_CHECK_", "MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_PERTURB_",
    "MALLOC_TOP_PAD_", "MALLOC_TRIM_THRESHOLD_",
)  # fmt: skip
"""All that glibc reads (mallopt(3)). Fewer arenas are no threshold, but who limits them wants less memory kept, not
more."""
_ALLOCATORS = ("jemalloc", "tcmalloc", "mimalloc", "hoard", "snmalloc")
"""Parts of the names of libraries that take glibc's place. Where one is linked into the program, the call does nothing."""

_tuned = False
"""Whether this process has been tuned; its forked children have been with it."""


def tune(wanted: bool) -> str:
    """Sets the thresholds, once in a process, and returns what was done for the run's configuration. wanted:
    `tune_malloc`."""
    global _tuned
    if _tuned:
        return _DONE
    reason = reason_against(wanted, os.environ)
    if reason is None:
        try:
            reason = _set_thresholds()
        except (ImportError, OSError, AttributeError):  # a Python without ctypes or without a dynamic linker
            reason = "mallopt cannot be called"
    if reason is not None:
        return f"left alone: {reason}"
    _tuned = True
    return _DONE


def reason_against(wanted: bool, variables: Mapping[str, str]) -> str | None:
    """Why this process is not tuned, as far as settings say."""
    if not wanted:
        return "switched off"
    if not sys.platform.startswith("linux"):
        return "not glibc"
    if sys.maxsize < 2**32:
        return "not a 64-bit process"
    reasons = [f"{name} is set" for name in _VARIABLES if name in variables]
    reasons += [f"{name} is preloaded" for name in _ALLOCATORS if name in variables.get("LD_PRELOAD", "")]
    if "glibc.malloc." in variables.get("GLIBC_TUNABLES", ""):
        reasons.append("GLIBC_TUNABLES sets glibc.malloc")
    return next(iter(reasons), None)


def _set_thresholds() -> str | None:
    """None where both are set now, else what stood in the way."""
    import ctypes

    process = ctypes.CDLL(None)
    if not hasattr(process, "gnu_get_libc_version"):
        return "not glibc"  # musl
    taken = process.mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD) and process.mallopt(M_TRIM_THRESHOLD, TRIM_THRESHOLD)
    return None if taken else "mallopt refused"
