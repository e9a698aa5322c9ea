"""Tables of docs/evidence/benchmarks.md: each is written between two comments by the script that measured it, and by nothing
else."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from collections.abc import Sequence
from pathlib import Path

__all__ = ["PAGE", "figure", "machine", "replace", "table"]

PAGE = Path(__file__).resolve().parents[1] / "docs" / "evidence" / "benchmarks.md"


def replace(section: str, text: str, page: Path = PAGE) -> None:
    """Puts text between `<!-- section:begin -->` and `<!-- section:end -->`. Raises ValueError for a section the page
    has not."""
    whole = page.read_text("utf-8")
    pattern = re.compile(rf"(<!-- {re.escape(section)}:begin -->\n).*?(<!-- {re.escape(section)}:end -->)", re.DOTALL)
    if not pattern.search(whole):
        raise ValueError(
            f"{page} has no section {section!r}: it needs <!-- {section}:begin --> and <!-- {section}:end -->"
        )
    page.write_text(pattern.sub(lambda match: f"{match[1]}{text.strip()}\n{match[2]}", whole), "utf-8")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def figure(value: float) -> str:
    """About three significant digits, without an exponent."""
    size = abs(value)
    return f"{value:.{0 if size >= 100 else 1 if size >= 10 else 2 if size >= 0.1 else 3}f}"


def machine(*packages: str) -> str:
    """The machine in words, without its name: processor, cores, memory, system, Python, versions."""
    versions = [f"{name} {importlib.metadata.version(name)}" for name in packages]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    parts = [
        _processor(),
        f"{os.cpu_count()} cores",
        f"{memory:.0f} GiB memory",
        f"{platform.system()} {platform.machine()}",
        f"Python {platform.python_version()}",
        *versions,
    ]
    return ", ".join(part for part in parts if part)


def _processor() -> str:
    try:
        names = re.findall(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text("utf-8"), re.MULTILINE)
    except OSError:
        return platform.processor()
    return str(names[0]).strip() if names else platform.processor()
