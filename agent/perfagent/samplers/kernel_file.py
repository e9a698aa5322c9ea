"""A small file of /proc, /sys or a control group, kept open.

Reading it again is one system call instead of three, and no path is walked: 3 to 6 µs saved of 8 to 15. A list (of disks, of
interfaces) takes one more: the kernel gives it in pieces of at most a page, whole lines.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from perfagent.process.descriptors import Descriptor, opened

__all__ = ["KernelFile"]

_PAGE = os.sysconf("SC_PAGE_SIZE")


class KernelFile:
    """`read()` gives the file's text as it is now, or None where it cannot be read. path: None for no file. most: bytes that
    are of interest."""

    __slots__ = ("_file", "_most", "_off", "_path")

    def __init__(self, path: Path | None, most: int = 4096) -> None:
        self._path, self._most = str(path), most
        self._file: Descriptor | None = None
        self._off = path is None

    def read(self) -> bytes | None:
        if self._off:
            return None
        file = self._file
        try:
            if file is None or not file.is_ours:
                file = self._file = opened(self._path, os.O_RDONLY)
            text = piece = os.pread(file.fd, self._most, 0)
            while piece and _PAGE < self._most > len(text):
                piece = os.pread(file.fd, self._most - len(text), len(text))
                text += piece
            return text
        except OSError:  # no such file, a process that ended, a controller that was taken away: not asked for again
            self._off = True
            return None

    def number(self) -> int | None:
        """The file's one number; None for "max" and where there is none."""
        try:
            return int(self.read() or b"")
        except ValueError:
            return None

    def __del__(self) -> None:
        with contextlib.suppress(
            AttributeError, TypeError, OSError
        ):  # at the very end of the process modules are empty
            if self._file is not None:
                self._file.close()
