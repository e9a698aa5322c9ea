"""Splits console output into lines, and removes color codes and the rank labels of launchers."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Iterator

__all__ = ["lines_of", "unlabelled"]

_COLORS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_ENDS, _LONGEST = re.compile(r"[\n\r\x08]+"), 100_000
_LABEL = re.compile(
    r"^(?:\s*(?P<label>\[rank\s?\d+\]:?|\[?(?:default)?\d+\]?:(?=\s)|\[\w[\w.-]*:\d+\]:|\(\w+[^()]*pid=\d+[^()]*\))\s?)"
)
"""What torchrun, srun -l, DeepSpeed and Ray put before the lines of a rank."""


def lines_of(pieces: Iterable[bytes]) -> Iterator[str]:
    """Those that are not empty; a part beyond 100,000 characters is left out. What a progress bar overwrote are lines, too."""
    decoder, rest = codecs.getincrementaldecoder("utf-8")("replace"), ""
    for piece in pieces:
        *whole, rest = _ENDS.split(rest[:_LONGEST] + decoder.decode(piece))
        yield from (_COLORS.sub("", line) for line in whole if line)
    if rest := rest + decoder.decode(b"", final=True):
        yield _COLORS.sub("", rest)


def unlabelled(line: str) -> tuple[str, str]:
    """(who printed it, the line): "" where nothing says who."""
    found = _LABEL.match(line)
    return (found["label"].rstrip(":"), line[found.end() :]) if found else ("", line)
