"""Which process trains in a checkpoint folder: it holds a record lock on a file there until it ends, however it ends.

No fork child inherits such a lock. Where the file system has none, no process is found. Nothing here waits or raises.
"""

from __future__ import annotations

import errno
import fcntl
import os
import weakref
from pathlib import Path

__all__ = ["FolderUse", "folder_use"]

_FILE = ".in_use"


class FolderUse:
    """Of this process, while the object lives. other: the process that has the folder instead, such as `process 12 on
    node3`."""

    def __init__(self, path: Path, *, begins: bool) -> None:
        self.other: str | None = None
        self._fd = -1
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if begins else 0), 0o644)
            self._lock(begins=begins)
        except OSError:  # nobody has trained here, we may not write, or the file system has no locks
            pass

    def _lock(self, *, begins: bool) -> None:
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                self.other = "another process"
                self.other = os.pread(self._fd, 300, 0).decode(errors="replace") or self.other
            return
        if begins:
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"process {os.getpid()} on {os.uname().nodename}".encode(), 0)

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)


_ours: weakref.WeakValueDictionary[Path, FolderUse] = weakref.WeakValueDictionary()
"""By folder: a second descriptor of the file would end the lock of this process when it is closed."""


def folder_use(folder: Path, *, begins: bool) -> FolderUse:
    """begins: this process trains in it from here on; else it only asks."""
    use = _ours.get(folder)
    if use is None:
        use = FolderUse(folder / _FILE, begins=begins)
        if begins and use.other is None:
            _ours[folder] = use
    return use
