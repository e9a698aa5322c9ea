"""A small file of /proc, /sys or a control group, kept open.

Reading it again is one system call instead of three (open, read, close), and no path is walked: 3 to 6 µs saved of 8 to 15.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

__all__ = ["KernelFile"]


class KernelFile:
    """`read()` gives the file's text as it is now, or None where it cannot be read. most: bytes that are of interest."""

    __slots__ = ("_fd", "_most", "_path")

    def __init__(self, path: Path | str, most: int = 4096) -> None:
        self._path, self._most = str(path), most
        self._fd = -1

    def read(self) -> bytes | None:
        if self._fd == -1:
            try:
                self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                self._fd = -2  # not asked for again
        if self._fd < 0:
            return None
        try:
            return os.pread(self._fd, self._most, 0)
        except OSError:  # a process that ended, a controller that was taken away
            self.close()
            return None

    def number(self) -> int | None:
        """The file's one number; None for "max" and where there is none."""
        text = self.read()
        try:
            return None if text is None else int(text)
        except ValueError:
            return None

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, TypeError):  # at the very end of the process modules are empty
            self.close()  # a search of many runs in one process would come to its limit of open files

    def close(self) -> None:
        """For good. In a forked child: its copies of our descriptors are nobody's."""
        fd, self._fd = self._fd, -2
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)
