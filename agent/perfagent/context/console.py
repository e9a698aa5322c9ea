"""The tail of what a script prints.

The console is watched through the `write` of the very objects that sys.stdout and sys.stderr are: they stay the same objects,
with the same type, descriptor and isatty(), and every character still goes where it went.
"""

from __future__ import annotations

import contextlib
import math
import re
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perfagent.delivery.sender import Sender, Source

__all__ = ["Console"]

LINES_PER_S = 200
LINE_CHARACTERS = 4000
"""What is kept of a line until it is redacted, and then shortened (redaction/text.py)."""
KEY_LINES = 200
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b[@-_]")
_MARKER = "_perfagent_console"


class Console:
    """The tail of what the script prints, as "log" events of at most 200 lines a second.

    `Console(sender).install()`; `close()` takes everything out again. A progress bar that rewrites its line with carriage
    returns is one line, as on the screen. A write by the script costs one append more.
    """

    def __init__(self, sender: Sender, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._sender, self._clock = sender, clock
        self._streams: list[_Stream] = []
        self._source: Source | None = None
        self._budget = float(LINES_PER_S)
        self._refilled = clock()
        self.left_out = 0

    def install(self) -> None:
        for name in ("stdout", "stderr"):
            target = getattr(sys, name, None)
            if target is None or getattr(target, _MARKER, None) is not None:
                continue
            stream = _Stream(name, target)
            if stream.watch(lambda: self._sender.disabled, self._rouse):
                self._streams.append(stream)
        if self._streams:
            self._source = self._sender.add_source(self.poll, every_s=math.inf)

    def _rouse(self) -> None:
        """Something was printed. On whatever thread printed it: two assignments."""
        if self._source is not None:
            self._source.due = self._sender.sources_due = 0.0

    def close(self) -> None:
        for stream in self._streams:
            stream.release()

    def poll(self) -> None:
        """On the sender thread, at the tick after something was printed: whole lines become events."""
        if not any(stream.pieces for stream in self._streams):
            return
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
        self.pieces: deque[str] = deque(maxlen=5000)
        self._rest = ""
        self._key_lines = 0

    def watch(self, off: Callable[[], bool], rouse: Callable[[], None]) -> bool:
        """rouse: called after each write. False where the target cannot be watched."""
        write, pieces = self._target.write, self.pieces

        def seen(text: str, /) -> Any:
            result = write(text)
            if not off():
                pieces.append(text)
                rouse()
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
        while self.pieces:
            piece = self.pieces.popleft()
            parts.append(piece if isinstance(piece, str) else str(piece))
        text = "".join(parts)
        *whole, self._rest = text.split("\n")
        if len(self._rest) > 100_000:
            self._rest = self._rest[-1000:]
        if "\r" in self._rest:
            self._rest = self._rest[self._rest.rstrip("\r").rfind("\r") + 1 :]
        return [shown for line in whole if (shown := self._without_key(_as_shown(line)))]

    def _without_key(self, line: str) -> str:
        """A private key has many lines; they may come in different events, and none but the first tells what it is."""
        if self._key_lines:
            self._key_lines = 0 if "-----END" in line else self._key_lines - 1
            return ""
        if "PRIVATE KEY" in line and "-----BEGIN" in line and "-----END" not in line:
            from perfagent.redaction import HIDDEN  # the sender's thread has it by now

            self._key_lines = KEY_LINES
            return f"{line[: line.index('-----BEGIN')]}{HIDDEN}"
        return line


def _as_shown(line: str) -> str:
    """The line as it stands on the screen in the end: what carriage returns overwrote and colors left out."""
    line = line.rstrip("\r")
    line = line[line.rfind("\r") + 1 :]
    if "\x1b" in line:
        line = _ESCAPES.sub("", line)
    return line.rstrip()[:LINE_CHARACTERS]
