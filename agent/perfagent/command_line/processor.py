"""The processor of this machine, in words."""

from __future__ import annotations

import platform
import re
from pathlib import Path

__all__ = ["cpuinfo", "processor"]


def processor() -> str:
    """Its name, as far as the system tells it."""
    return cpuinfo("model name") or platform.processor() or platform.machine()


def cpuinfo(key: str) -> str:
    """The first value of a key in /proc/cpuinfo; "" where there is none."""
    try:
        found = re.search(rf"^{key}\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text("utf-8"), re.MULTILINE)
    except OSError:
        return ""
    return found[1].strip() if found else ""
