"""A folder of checkpoints on disk: writes them, finds the newest, and deletes old ones.

A checkpoint is written into `step_N.tmp`, every file and folder is synced, and one rename makes it `step_N`: whoever
looks, at whatever moment the writer dies, sees it whole or not at all. `latest` (and `best`) name the newest (and best)
one for people and other tools; reading trusts the manifests' numbers, because the writer may die between the two
renames. Nothing that this module did not write is ever deleted."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import tempfile
import weakref
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Literal

from perfagent.errors import CheckpointError
from perfagent.wire.quantities import size
from perfagent_loop.events import tell
from perfagent_loop.manifest import NAME, DamagedCheckpoint, Manifest

__all__ = ["Folder", "FolderUse", "folder_use", "sync_file", "sync_folder"]

_COMPLETE = re.compile(r"step_(\d+)(\.old)?")
_IN_USE = ".in_use"
_LEFT_OVER = re.compile(r"step_\d+\.(tmp|gone)")


class Folder:
    """The folder at `path`, made when the first checkpoint is written."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def candidates(self) -> list[tuple[Path, Manifest]]:
        """Complete checkpoints with a readable manifest, the newest first. Their files are not yet verified."""
        return self.look()[0]

    def look(self) -> tuple[list[tuple[Path, Manifest]], list[tuple[Path, str]]]:
        """The candidates; and checkpoints whose manifest is damaged, and why, the highest step first."""
        good: list[tuple[Path, Manifest]] = []
        bad: list[tuple[Path, str]] = []
        for path in self._named(_COMPLETE):
            try:
                good.append((path, Manifest.read(path)))
            except DamagedCheckpoint as error:
                bad.append((path, str(error)))
        good.sort(key=lambda one: one[1].number, reverse=True)
        bad.sort(key=lambda one: int(_COMPLETE.fullmatch(one[0].name).group(1)), reverse=True)  # type: ignore[union-attr]
        return good, bad

    def files(self, folder: Path) -> list[str]:
        """Every file below a checkpoint's folder but its manifest, as paths relative to it, sorted."""
        return sorted(
            path.relative_to(folder).as_posix()
            for path in folder.rglob("*")
            if not path.is_dir() and path != folder / NAME
        )

    def _named(self, pattern: re.Pattern[str]) -> Iterator[Path]:
        if not self.path.is_dir():
            return
        for path in sorted(self.path.iterdir()):
            if pattern.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
                yield path

    def obstacle(self) -> str:
        """Makes the folder, and a file in it that is gone at once. Returns why that cannot be; empty where it can."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.path):
                return ""
        except OSError as error:
            return f"{type(error).__name__}: {error}"

    def begin(self, step: int, expected_bytes: int) -> Path:
        """An empty `step_N.tmp`, after what earlier writers left unfinished is gone.

        Raises CheckpointError when the file system has less room than expected_bytes and a hundredth of it.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        for path in self._named(_LEFT_OVER):
            shutil.rmtree(path)
        free = shutil.disk_usage(self.path).free
        needed = expected_bytes + expected_bytes // 100 + 2**16
        if free < needed:
            raise CheckpointError(
                f"no room for the checkpoint of step {step}: it needs {size(needed)}, {self.path} has {size(free)} free; "
                "free some space, lower keep=, or choose another folder"
            )
        tmp = self.path / f"step_{step}.tmp"
        tmp.mkdir()
        return tmp

    def commit(self, tmp: Path, manifest: Manifest) -> Path:
        """Makes `step_N.tmp` the checkpoint `step_N`. Its files must be synced already."""
        _write(tmp / NAME, manifest.encode(), "xb")
        for inside in [tmp, *(path for path in tmp.rglob("*") if path.is_dir())]:
            sync_folder(inside)
        final, old = tmp.with_suffix(""), tmp.with_suffix(".old")
        if final.exists():  # a run that was rolled back, or that fell back, comes to the same step again
            self._remove(old)
            final.rename(old)  # a candidate until the new one is there
        tmp.rename(final)
        sync_folder(self.path)
        try:
            self._point("latest", final)
            self._remove(old)
        except OSError as error:  # the checkpoint is there: reading needs neither
            tell("latest was not written", f"{final.name} is whole, but {type(error).__name__}: {error}")
        return final

    def retain(self, keep: int, best: str | None, damaged: Collection[Path] = ()) -> Path | None:
        """Keeps the newest `keep` checkpoints and, with best "min" or "max", the best one, which it returns.

        damaged: some that are not whole; they do not count, and go when `keep` newer ones are there."""
        everything = self.candidates()
        candidates = [one for one in everything if one[0] not in damaged]
        rated = [one for one in candidates if one[1].metric is not None and one[1].metric == one[1].metric]
        sign = -1.0 if best == "max" else 1.0
        winner = None
        if best and rated:
            winner = min(rated, key=lambda one: (sign * (one[1].metric or 0.0), -one[1].number))[0]
            self._point("best", winner)
        oldest = candidates[:keep][-1][1].number if len(candidates) >= keep else 0
        for path, manifest in everything:
            if manifest.number < oldest and path != winner:
                self._remove(path)
        return winner

    def abandon(self, tmp: Path) -> None:
        shutil.rmtree(tmp, ignore_errors=True)

    def _point(self, name: str, target: Path) -> None:
        new = self.path / f"{name}.tmp"
        _write(new, f"{target.name}\n".encode("ascii"), "wb")
        new.replace(self.path / name)
        sync_folder(self.path)

    def _remove(self, path: Path) -> None:
        """Renamed first, so that a writer that dies here leaves no half checkpoint under a good name."""
        if path.exists():
            gone = path.with_name(f"{path.name.partition('.')[0]}.gone")
            shutil.rmtree(gone, ignore_errors=True)
            path.rename(gone)
            shutil.rmtree(gone)


def _write(path: Path, content: bytes, mode: Literal["xb", "wb"]) -> None:
    with path.open(mode) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_file(path: Path) -> None:
    """Waits until a file's content is on the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Waits until a folder's names are on the disk; some network file systems refuse, and have no such wait."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(handle)
    finally:
        os.close(handle)


class FolderUse:
    """Which process trains in the folder: this one, while the object lives, or `other`, such as `process 12 on node3`.

    It holds a record lock on a file there until it ends, however it ends. No fork child inherits such a lock. Where the
    file system has none, no process is found. Nothing here waits or raises."""

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
        use = FolderUse(folder / _IN_USE, begins=begins)
        if begins and use.other is None:
            _ours[folder] = use
    return use
