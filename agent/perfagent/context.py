"""What a run was started with and what it prints: command line, git commit, versions, host, and the tail of its console.

The console is watched through the `write` of the very objects that sys.stdout and sys.stderr are: they stay the same objects,
with the same type, descriptor and isatty(), and every character still goes where it went. Nothing here is redacted: everything
that leaves the process goes through redaction.py (in sender.py, for all events alike).
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perfagent.delivery.sender import Sender

__all__ = ["Console", "command_line", "describe", "git_commit"]

LINES_PER_S = 200
LINE_CHARACTERS = 500
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b[@-_]")
_MARKER = "_perfagent_console"


def describe() -> dict[str, Any]:
    """What the first event of a run tells about its process; what is not known is absent. Imports nothing."""
    found: dict[str, Any] = {
        "host": platform.node(),
        "pid": os.getpid(),
        "python": platform.python_version(),
        "command": command_line(),
        "cwd": _cwd(),
        "cpus": os.cpu_count(),
        "git_commit": git_commit(),
        "user": os.environ.get("USER"),
    }
    torch = sys.modules.get("torch")
    if torch is not None:
        found["torch"] = str(getattr(torch, "__version__", ""))
        found["cuda"] = getattr(getattr(torch, "version", None), "cuda", None)
    return {key: value for key, value in found.items() if value not in (None, "", [])}


def command_line() -> list[str]:
    """The words that started this process, as the shell gave them: sys.orig_argv, since scripts edit sys.argv."""
    return list(getattr(sys, "orig_argv", sys.argv))


def _cwd() -> str | None:
    try:
        return str(Path.cwd())
    except OSError:  # the folder was removed
        return None


def git_commit(start: Path | None = None) -> str | None:
    """The commit checked out in the folder of the script (or its parents), read from .git without starting git."""
    folder = start
    if folder is None:
        script = getattr(sys.modules.get("__main__"), "__file__", None)
        with contextlib.suppress(OSError):
            folder = Path(script).resolve().parent if script else Path.cwd()
    if folder is None:
        return None
    with contextlib.suppress(OSError, ValueError, IndexError):
        for candidate in (folder, *folder.parents):
            git = candidate / ".git"
            if git.is_file():  # a worktree or submodule: "gitdir: <path>"
                git = (candidate / git.read_text(encoding="utf-8").partition(":")[2].strip()).resolve()
            if git.is_dir():
                return _head(git)
    return None


def _head(git: Path) -> str | None:
    head = (git / "HEAD").read_text(encoding="utf-8").strip()
    if not head.startswith("ref: "):
        return head
    reference = head[5:]
    common = git / "commondir"
    places = [git, (git / common.read_text(encoding="utf-8").strip()).resolve()] if common.is_file() else [git]
    for place in places:
        if (place / reference).is_file():
            return (place / reference).read_text(encoding="utf-8").strip()
    for place in places:
        if (place / "packed-refs").is_file():
            for line in (place / "packed-refs").read_text(encoding="utf-8").splitlines():
                if line.endswith(" " + reference):
                    return line.split(" ", 1)[0]
    return None


class Console:
    """The tail of what the script prints, as "log" events of at most 200 lines a second.

    `Console(sender).install()`; `close()` takes everything out again. A progress bar that rewrites its line with carriage
    returns is one line, as on the screen. A write by the script costs one append more.
    """

    def __init__(self, sender: Sender, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._sender, self._clock = sender, clock
        self._streams: list[_Stream] = []
        self._budget = float(LINES_PER_S)
        self._refilled = clock()
        self.left_out = 0

    def install(self) -> None:
        for name in ("stdout", "stderr"):
            target = getattr(sys, name, None)
            if target is None or getattr(target, _MARKER, None) is not None:
                continue
            stream = _Stream(name, target)
            if stream.watch(lambda: self._sender.disabled):
                self._streams.append(stream)
        if self._streams:
            self._sender.add_source(self.poll)

    def close(self) -> None:
        for stream in self._streams:
            stream.release()

    def poll(self) -> None:
        """On the sender thread: whole lines become events; a progress bar is looked at as it stands, once a second at most."""
        now = self._clock()
        self._budget = min(LINES_PER_S, self._budget + LINES_PER_S * (now - self._refilled))
        self._refilled = now
        for stream in self._streams:
            lines = stream.lines()
            room = int(self._budget)
            if len(lines) > room:
                self.left_out += len(lines) - room
                self._sender.counters["log_lines_left_out"] += len(lines) - room
                lines = lines[-room:] if room else []
            if lines:
                self._budget -= len(lines)
                self._sender.event("log", {"lines": lines, "stream": stream.name})


class _Stream:
    """One of sys.stdout and sys.stderr. What is written is kept in pieces; lines are made of them later, on another thread."""

    def __init__(self, name: str, target: Any) -> None:
        self.name, self._target = name, target
        self._pieces: deque[str] = deque(maxlen=5000)
        self._rest = ""

    def watch(self, off: Callable[[], bool]) -> bool:
        write, pieces = self._target.write, self._pieces

        def seen(text: str, /) -> Any:
            result = write(text)
            if not off():
                pieces.append(text)
            return result

        try:
            self._target.write = seen  # on the instance: a text stream of the io module has a dict of its own
            setattr(self._target, _MARKER, seen)
        except AttributeError:
            return False
        return True

    def release(self) -> None:
        if getattr(self._target, _MARKER, None) is self._target.__dict__.get("write"):  # somebody else's wrapper stays
            with contextlib.suppress(AttributeError):
                del self._target.write
        with contextlib.suppress(AttributeError):
            delattr(self._target, _MARKER)

    def lines(self) -> list[str]:
        parts = [self._rest]
        while self._pieces:
            piece = self._pieces.popleft()
            parts.append(piece if isinstance(piece, str) else str(piece))
        text = "".join(parts)
        *whole, self._rest = text.split("\n")
        if len(self._rest) > 100_000:
            self._rest = self._rest[-1000:]
        if "\r" in self._rest:
            self._rest = self._rest[self._rest.rstrip("\r").rfind("\r") + 1 :]
        return [shown for line in whole if (shown := _as_shown(line))]


def _as_shown(line: str) -> str:
    """The line as it stands on the screen in the end: what carriage returns overwrote and colors left out."""
    line = line.rstrip("\r")
    line = line[line.rfind("\r") + 1 :]
    if "\x1b" in line:
        line = _ESCAPES.sub("", line)
    return line.rstrip()[:LINE_CHARACTERS]
