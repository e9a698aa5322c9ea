"""Keeps file descriptors by what they point to, not by their number alone.

A descriptor can be closed and its number reused at any time. A daemon closes all descriptors; a script that closes its own
descriptor twice may close ours. If a process starts without standard streams, the first files that it opens get the numbers
0 to 2, and native code that prints would write into them.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

__all__ = ["Descriptor", "above_streams", "opened"]

_FIRST = 3
"""Below are standard input, output and error, also where they are closed."""


class Descriptor:
    """An open file or socket of ours. fd: its number; to be used only while `is_ours`."""

    __slots__ = ("_identity", "_linked", "fd")

    def __init__(self, fd: int) -> None:
        found = os.fstat(fd)
        self.fd = fd
        self._identity = found.st_dev, found.st_ino
        self._linked = found.st_nlink > 0

    @property
    def is_ours(self) -> bool:
        """Whether the number still means what was opened."""
        return self.is_deleted is not None

    @property
    def is_deleted(self) -> bool | None:
        """Whether the file was deleted meanwhile. None where it is not ours."""
        try:
            found = os.fstat(self.fd)
        except OSError:
            return None
        return self._linked and not found.st_nlink if (found.st_dev, found.st_ino) == self._identity else None

    def close(self) -> None:
        """Raises OSError as os.close does; nothing is done with a number that is somebody else's."""
        if self.is_ours:
            fd, self.fd = self.fd, -1
            os.close(fd)


def opened(path: str | Path, flags: int) -> Descriptor:
    """A file for this user alone, which no program that is started from here gets to see. Raises OSError."""
    fd = above_streams(os.open(path, flags | os.O_CLOEXEC, 0o600))
    try:
        return Descriptor(fd)
    except OSError:
        os.close(fd)
        raise


def above_streams(fd: int) -> int:
    """Moves a descriptor to a number that no standard stream has; the old one is closed. Raises OSError."""
    if fd >= _FIRST:
        return fd
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FIRST)
    finally:
        os.close(fd)
