"""Keeps glibc from giving the memory of every training step back to the kernel.

A step allocates and frees some MiB at the top of the heap. glibc returns the top to the kernel whenever it is larger
than its trim threshold, and the next step takes a page fault for every 4 KiB of it. Whether that happens depends on
which small object lies above, so any change of the heap can start it, `attach` included: 1,200 faults and up to 3 ms
more in a CPU step of 5 ms (benchmarks/overhead/heap.py). The two thresholds below are the largest that glibc's own
adjustment can reach, so the process keeps no memory that glibc might not have kept by itself.

Set in this process by mallopt(3), never through the environment, which every child would inherit. There is no way back:
glibc reports neither its thresholds nor whether it still adjusts them, so they stay after the run. Whoever has set the
allocator himself keeps his settings.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

__all__ = ["reason_against", "tune"]

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
MMAP_THRESHOLD = 32 * 2**20  # DEFAULT_MMAP_THRESHOLD_MAX of glibc on 64-bit systems
TRIM_THRESHOLD = 2 * MMAP_THRESHOLD  # what glibc derives from it
_DONE = "tuned: mmap threshold 32 MiB, trim threshold 64 MiB"
_VARIABLES = (
    "MALLOC_ARENA_MAX",
    "MALLOC_ARENA_TEST",
    "MALLOC_CHECK_",
    "MALLOC_MMAP_MAX_",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_PERTURB_",
    "MALLOC_TOP_PAD_",
    "MALLOC_TRIM_THRESHOLD_",
)
"""All that glibc reads (mallopt(3)). Fewer arenas are no threshold, but who limits them wants less memory kept, not
more."""
_REPLACED = ("malloc", "calloc", "realloc", "free")
"""What every other allocator must define to take glibc's place."""
_DLADDR_SYMBOL = 1  # RTLD_DL_SYMENT

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
    for name in _VARIABLES:
        if name in variables:
            return f"{name} is set"
    return "GLIBC_TUNABLES sets glibc.malloc" if "glibc.malloc." in variables.get("GLIBC_TUNABLES", "") else None


def _set_thresholds() -> str | None:
    """None where both are set now, else what stood in the way."""
    import ctypes

    process = ctypes.CDLL(None)
    if not hasattr(process, "gnu_get_libc_version"):
        return "not glibc"  # musl
    other = _other_allocator(process)
    if other is not None:
        return f"malloc is that of {other}"
    taken = process.mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD) and process.mallopt(M_TRIM_THRESHOLD, TRIM_THRESHOLD)
    return None if taken else "mallopt refused"


def _other_allocator(process: Any) -> str | None:
    """The file that takes the place of glibc's malloc: preloaded (jemalloc, tcmalloc, mimalloc) or linked into the
    program."""
    libc, _ = _definition(process, "gnu_get_libc_version")
    for name in _REPLACED:
        file, defined = _definition(process, name)
        # A program that is not position-independent has an entry of its own for a function of a library; it defines
        # nothing.
        if file != libc and defined:
            return os.path.basename(file) or "another library"  # noqa: PTH119 - a text, which may be no path
    return None


def _definition(process: Any, name: str) -> tuple[str, bool]:
    """The file that a function's address lies in, and whether that file defines the function."""
    import ctypes

    class Information(ctypes.Structure):
        _fields_ = (
            ("file", ctypes.c_char_p),
            ("base", ctypes.c_void_p),
            ("symbol", ctypes.c_char_p),
            ("address", ctypes.c_void_p),
        )

    class Symbol(ctypes.Structure):  # the beginning of Elf64_Sym
        _fields_ = (
            ("name", ctypes.c_uint32),
            ("info", ctypes.c_uint8),
            ("other", ctypes.c_uint8),
            ("section", ctypes.c_uint16),
        )

    found, symbol = Information(), ctypes.POINTER(Symbol)()
    address = ctypes.cast(getattr(process, name), ctypes.c_void_p)
    if not process.dladdr1(address, ctypes.byref(found), ctypes.byref(symbol), _DLADDR_SYMBOL):
        return "", True
    return os.fsdecode(found.file or b""), not symbol or symbol.contents.section != 0
