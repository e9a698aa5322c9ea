"""Reads the state of the script's git repository from its files, where git need not be installed. Whether tracked files differ
from the commit only `git` itself can say, with its index, attributes and filters: it is asked on the courier's thread.

Formats: gitrepository-layout and git-config of git's documentation.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from perfagent.redaction import redacted_text

__all__ = ["ChangedFiles", "Repository", "find"]

MOST_S = 60.0
LOOK_S = 0.2
_KILLED_S = 2.0  # until a killed process is gone: milliseconds, on a machine that is not crowded
_HEXADECIMAL = frozenset("0123456789abcdef")


def find(start: Path | None = None) -> Repository | None:
    """The repository of a folder or of its parents; by default of the script's. None where there is none."""
    folder = start or _folder_of_script()
    with contextlib.suppress(OSError, ValueError):
        for root in () if folder is None else (folder, *folder.parents):
            git = root / ".git"
            if git.is_file():  # a worktree or submodule: "gitdir: <path>"
                git = (root / git.read_text("utf-8").partition(":")[2].strip()).resolve()
            if (git / "HEAD").is_file():
                return Repository(root, git, (git / _read(git / "commondir")).resolve())
    return None


def _folder_of_script() -> Path | None:
    """For a program that is installed (`accelerate`, `python -m package`) the working folder: what it trains lies
    there."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    with contextlib.suppress(OSError):
        folder = Path(script).resolve().parent if script else Path.cwd()
        programs = Path(sys.prefix, "bin").resolve()
        installed = folder == programs or not {"site-packages", "dist-packages"}.isdisjoint(folder.parts)
        return Path.cwd() if installed else folder
    return None


class Repository(NamedTuple):
    """root: the working tree; git: its .git; common: what worktrees share (refs, configuration, objects)."""

    root: Path
    git: Path
    common: Path

    def describe(self) -> dict[str, str]:
        """commit, branch (absent when detached) and remote (without credentials), as far as they are known."""
        found = {"commit": self.commit(), "branch": self.branch(), "remote": self.remote()}
        return {name: value for name, value in found.items() if value}

    def branch(self) -> str | None:
        head = _read(self.git / "HEAD")
        if not head.startswith("ref: ") or head.endswith("/.invalid"):  # of git's newer format, in tables
            return None
        return head.removeprefix("ref: ").removeprefix("refs/heads/")

    def commit(self) -> str | None:
        """The commit that is checked out; None before the first one."""
        text = _read(self.git / "HEAD")
        for _ in range(5):  # a symbolic reference may name another
            if not text.startswith("ref: "):
                return text if len(text) in (40, 64) and _HEXADECIMAL.issuperset(text) else None
            text = self._reference(text[5:])
        return None

    def _reference(self, name: str) -> str:
        for place in (self.git, self.common):
            if text := _read(place / name):
                return text
        for line in _read(self.common / "packed-refs").splitlines():
            if line.endswith(" " + name):
                return line.split(" ", 1)[0]
        return ""

    def remote(self) -> str | None:
        """Where the branch is pushed to, else `origin`, else the only remote; user and password are left out."""
        config = _read(self.common / "config")
        addresses = dict(re.findall(r'(?im)^\s*\[remote "(.+)"\][^\[]*?^\s*url\s*=\s*"?(.+?)"?\s*$', config))
        branch = re.escape(self.branch() or "")
        tracked = re.search(rf'(?im)^\s*\[branch "{branch}"\][^\[]*?^\s*remote\s*=\s*"?(\S+?)"?\s*$', config)
        first = next(iter(addresses.values()), None) if len(addresses) == 1 else None
        address = addresses.get(tracked[1] if tracked else "") or addresses.get("origin") or first
        return redacted_text(re.sub(r"^([a-zA-Z][a-zA-Z0-9+.-]*://)[^/\s]*@", r"\1", address)) if address else None


class ChangedFiles:
    """Asks `git` whether tracked files differ from the commit: staged or not, and in submodules too.

    tell: gets the answer. There is no answer if git is not installed, if it takes more than a minute, or if it refuses a
    repository of somebody else, which may name programs that git would run: safe.directory stays as it is."""

    def __init__(
        self, root: Path, tell: Callable[[bool], None], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._root, self._tell, self._clock = root, tell, clock
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = threading.Event()
        self._until = 0.0

    def poll(self) -> bool:
        """On the courier's thread: waits a moment for git; False once there is nothing left to wait for."""
        if self._process is None:
            program = shutil.which("git")
            if program is None or self._closed.is_set():
                return False
            self._until = self._clock() + MOST_S
            others = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
            # The first line names the branch; without it, git has failed. aheadBehind=false saves a walk through commits.
            # (`git diff --quiet` would write the index.)
            command = [program, "-C", str(self._root), "-c", "status.aheadBehind=false"]
            command += ["status", "--porcelain", "--branch", "-uno"]
            self._process = subprocess.Popen(
                command, env=others | {"GIT_OPTIONAL_LOCKS": "0"}, stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            )  # fmt: skip
            if self._closed.is_set():  # in between
                self.close()
        try:
            branch, *files = self._process.communicate(timeout=LOOK_S)[0].splitlines() or [b""]
        except subprocess.TimeoutExpired:
            if self._clock() < self._until:
                return True
            self.close()
            return False
        except (OSError, ValueError):  # the run has ended meanwhile
            return False
        if branch.startswith(b"##"):
            self._tell(bool(files))
        return False

    def close(self) -> None:
        """Ends git where it still runs: at the end of the run, on any thread."""
        self._closed.set()
        if self._process is not None:
            self._process.kill()
            with contextlib.suppress(OSError, subprocess.TimeoutExpired, ValueError):
                self._process.communicate(timeout=_KILLED_S)


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace").strip()
    except OSError:
        return ""
