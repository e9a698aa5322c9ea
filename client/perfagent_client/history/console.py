"""Splits console output into lines, and removes color codes and the rank labels of launchers."""

from __future__ import annotations

import re

__all__ = ["lines_of", "unlabelled"]

_COLORS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_LABEL = re.compile(
    r"^(?:\s*(?P<label>\[rank\s?\d+\]:?|\[?(?:default)?\d+\]?:(?=\s)|\[\w[\w.-]*:\d+\]:|\(\w+[^()]*pid=\d+[^()]*\))\s?)"
)
"""What torchrun, srun -l, DeepSpeed and Ray put before the lines of a rank."""


def lines_of(data: bytes) -> list[str]:
    """What a progress bar overwrote are lines, too."""
    text = _COLORS.sub("", data.decode("utf-8", "replace"))
    return re.split(r"[\n\r\x08]+", text)


def unlabelled(line: str) -> tuple[str, str]:
    """(who printed it, the line): "" where nothing says who."""
    found = _LABEL.match(line)
    return (found["label"].rstrip(":"), line[found.end() :]) if found else ("", line)
