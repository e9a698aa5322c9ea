"""Counts the English words that people wrote in the documents, by page: `scripts/words`.

Not counted: pages and parts that scripts write from code and results, blocks of code, comments, addresses of links, Chinese.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

__all__ = ["BUDGET", "words_by_page"]

BUDGET = 60_000
"""The most words of all pages together."""

_ROOT = Path(__file__).resolve().parents[1]
_WRITTEN = re.compile(r"^(?:<!-- )?(?:Written by|`scripts/authorization` writes)", re.IGNORECASE | re.MULTILINE)
"""In the head of a page: a script writes all of it."""
_LEFT_OUT = re.compile(
    r"^<!-- (?P<part>[\w-]+):begin -->.*?<!-- (?P=part):end -->"  # the result of a script
    r"|^[ \t]*(?P<fence>`{3,}|~{3,}).*?^[ \t]*(?P=fence)[ \t]*$"
    r"|<!--.*?-->"
    r"|(?<=\])\([^)\s]*\)"  # where a link leads
    r"|https?://\S+"
    r"|^::: \S+(?:\n    options:.*)?",
    re.DOTALL | re.MULTILINE,
)
_WORD = re.compile(r"(?a:[\w'’./:@=<>*+%-]*[A-Za-z][\w'’./:@=<>*+%-]*)")


def words_by_page() -> dict[str, int]:
    """The words of each page of the repository that has any."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "*.md"]
    names = subprocess.run(listed, cwd=_ROOT, capture_output=True, text=True, check=True).stdout
    pages = [name for name in sorted({*names.split("\0")}) if name and not re.search(r"(^|/)zh/|\.zh-CN\.md$", name)]
    counts = {name: _count((_ROOT / name).read_text("utf-8")) for name in pages if (_ROOT / name).is_file()}
    return {name: count for name, count in counts.items() if count}


def _count(text: str) -> int:
    if _WRITTEN.search("\n".join(text.splitlines()[:8])):
        return 0
    return len(_WORD.findall(_LEFT_OUT.sub(" ", text)))


def _print() -> None:
    counts = words_by_page()
    for name, count in sorted(counts.items(), key=lambda row: -row[1]):
        print(f"{count:7,}  {name}")  # noqa: T201
    print(f"{sum(counts.values()):7,}  of at most {BUDGET:,}")  # noqa: T201


if __name__ == "__main__":
    _print()
