"""What exceptions that many people meet are about, by their text: each has a remedy of its own (texts, `process_crash`)."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

__all__ = ["cause_by_text"]

_TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))["causes"]
_CAUSES = tuple((re.compile(one["pattern"]), str(one["cause"])) for one in _TABLE)


def cause_by_text(text: str) -> str:
    """A key of the remedies; "exception" where the text is none of these."""
    return next((cause for pattern, cause in _CAUSES if pattern.search(text)), "exception")
