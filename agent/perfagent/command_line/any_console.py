"""Lets every command print on a console that has no UTF-8: what it has no letter for becomes the nearest ASCII.

Set on the streams themselves, so that it holds for whatever writes to them: print, argparse, rich, textual, a
traceback."""

from __future__ import annotations

import codecs
import io
import sys
import unicodedata

__all__ = ["print_on_any_console"]

_ERRORS = "perfagent.nearest"
_NEAREST = dict(zip("µμ×·–─━↑↓✓✕●○◌■▲▁▂▃▄▅▆▇█░▒▓", "uux.---^v+x*oo#!_.:-=+*#.:=", strict=True)) | {
    "…": "...", "→": "->", "°": " deg ", "±": "+-", "‖": "||",
}  # fmt: skip
"""For the signs that perfagent itself writes; signs of a chart or table keep their width."""


def print_on_any_console() -> None:
    """A stream that a user has told what to do with other letters (PYTHONIOENCODING=latin-1:replace) keeps to that."""
    codecs.register_error(_ERRORS, _nearest)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "backslashreplace"):
            stream.reconfigure(errors=_ERRORS)


def _nearest(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(map(_ascii, error.object[error.start : error.end])), error.end


def _ascii(letter: str) -> str:
    plain = unicodedata.normalize("NFKD", letter).encode("ascii", "ignore").decode()
    return _NEAREST.get(letter) or plain or ("" if unicodedata.combining(letter) else "?")
