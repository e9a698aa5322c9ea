"""Describes a process by what is known at once: host, command line, versions. Imports nothing."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path
from typing import Any

__all__ = ["command_line", "describe"]


def describe() -> dict[str, Any]:
    """What the first event of a run says about its process; what is not known is absent."""
    found: dict[str, Any] = {
        "host": platform.node(),
        "pid": os.getpid(),
        "python": platform.python_version(),
        "command": command_line(),
        "cwd": _cwd(),
        "cpus": os.cpu_count(),
        "user": os.environ.get("USER"),
    }
    torch = sys.modules.get("torch")
    if torch is not None:
        found["torch"] = str(getattr(torch, "__version__", ""))
        found["cuda"] = getattr(getattr(torch, "version", None), "cuda", None)
    return {key: value for key, value in found.items() if value not in (None, "", [])}


def command_line() -> list[str]:
    """The words that started this process, as the shell gave them: sys.orig_argv, since scripts edit sys.argv."""
    return list(getattr(sys, "orig_argv", sys.argv))


def _cwd() -> str | None:
    try:
        return str(Path.cwd())
    except OSError:  # the folder was removed
        return None
