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
from threading import get_ident
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perfagent.delivery.sender import Sender, Source

__all__ = ["Console"]

LINES_PER_S = 200
LINE_CHARACTERS = 4000
"""What is kept of a line until it is redacted, and then shortened (redaction/text.py)."""
MOST_PIECES = 5000
KEY_LINES = 200
STATE_S = 10.0
"""So often the state of a line that is being rewritten (a progress bar) is told before it ends."""
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b[@-_]")
_MARKER = "_perfagent_console"


class Console:
    """The tail of what the script prints, as "log" events of at most 200 lines a second.

    `Console(sender).install()`; `close()` takes everything out again. A progress bar that rewrites its line with carriage
    returns is one line, as on the screen, and every 10 s its state is another. A write by the script costs one append more.
    """

    def __init__(self, sender: Sender, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._sender, self._clock = sender, clock
        self._streams: list[_Stream] = []
        self._source: Source | None = None
        self._closed = False
        self._budget = float(LINES_PER_S)
        self._refilled = clock()
        self.left_out = 0

    def install(self) -> None:
        self._source = self._sender.add_source(self.poll, every_s=math.inf)
        for name in ("stdout", "stderr"):
            stream = _Stream(name, getattr(sys, name, None))
            if stream.watch(self._sender, self._source):
                self._streams.append(stream)

    def close(self) -> None:
        """What is left is told at the sender's last poll: lines are made on its thread alone."""
        for stream in self._streams:
            stream.release()
        self._closed = True

    def poll(self) -> None:
        """On the sender thread, at the tick after something was printed and while a line has no end: lines become events."""
        if not any(stream.pieces or stream.rest for stream in self._streams):
            return
        closed, now = self._closed, self._clock()
        if self._source is not None:  # before the pieces are taken: what is printed after that makes it due at once
            self._source.due = time.monotonic() + STATE_S
        self._budget = min(LINES_PER_S, self._budget + LINES_PER_S * (now - self._refilled))
        self._refilled = now
        for stream in self._streams:
            lines = stream.lines(now, last=closed)
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
        self.pieces: deque[str] = deque(maxlen=MOST_PIECES)
        self.rest = ""
        """What has no end of line yet."""
        self._state, self._state_at = "", 0.0
        self._key_lines = 0
        self._own: dict[str, Any] = {}
        self._before: Any = None
        self._seen: Any = None

    def watch(self, sender: Sender, source: Source) -> bool:
        """source: made due by each write. False where the target cannot be watched; then it is as it was.

        Our write goes straight into the target's own dict: an assignment may go to another object (tqdm's DummyTqdmFile hands it
        on to the stream that it writes to, where it would call itself for ever) and could not be taken back.
        """
        with contextlib.suppress(Exception):  # somebody else's stream may raise anything when it is looked at
            if self._target is None or getattr(self._target, _MARKER, None) is not None:
                return False
            self._seen = self._watched(self._target.write, sender, source)
            self._own = object.__getattribute__(self._target, "__dict__")  # a text stream of the io module has one too
            self._before = self._own.get("write")
            self._own["write"] = self._own[_MARKER] = self._seen
            if self._target.write is self._seen:
                return True
        self.release()
        return False

    def _watched(self, write: Callable[..., Any], sender: Sender, source: Source) -> Callable[..., Any]:
        pieces, inside = self.pieces, 0

        def seen(*args: Any, **named: Any) -> Any:
            nonlocal inside
            thread = get_ident()
            if inside == thread:  # the stream's write came back to itself: the outer call has all of the text
                return write(*args, **named)
            try:
                inside = thread
                result = write(*args, **named) if named else write(*args)  # 10 ns less
            finally:
                inside = 0
            try:
                if not sender.disabled and isinstance(args[0], str):
                    pieces.append(args[0])
                    source.due = sender.sources_due = 0.0
            except Exception:  # noqa: BLE001, S110 - no text, no memory, no stack left: it was printed all the same
                pass
            return result

        return seen

    def release(self) -> None:
        """Puts back what was there before us."""
        own = self._own
        if own.get("write") is self._seen:  # somebody else's wrapper stays
            own["write"] = self._before
            if self._before is None:
                del own["write"]
        if own.get(_MARKER) is self._seen:
            own.pop(_MARKER, None)

    def lines(self, now: float, *, last: bool) -> list[str]:
        """Whole lines, and now and then the state of one that is being rewritten; last: what has no end is a line too."""
        if "\r" not in self.rest:
            self._state_at = now
        torn = len(self.pieces) == MOST_PIECES
        parts = [] if torn else [self.rest]
        while self.pieces:
            parts.append(self.pieces.popleft())
        text = "".join(parts)
        if torn:  # pieces may be missing before this: the end of a line alone may be the end of a secret, and hides nothing
            text = text.partition("\n")[2]
        *whole, self.rest = text.split("\n")
        if "\r" in self.rest:  # one of them stays: it tells that the line is being rewritten
            self.rest = self.rest[max(self.rest.rstrip("\r").rfind("\r"), 0) :]
        if len(self.rest) > 2 * LINE_CHARACTERS:
            self.rest = self.rest[:LINE_CHARACTERS]  # its beginning is what is shown; half a secret is known by nothing
        if last:
            whole, self.rest = [*whole, self.rest], ""
        lines = [self._without_key(_as_shown(line)) for line in whole]
        if lines:
            if lines[0] == self._state:
                lines[0] = ""  # told already
            self._state, self._state_at = "", now
        return [line for line in (*lines, self._new_state(now)) if line]

    def _new_state(self, now: float) -> str:
        if "\r" not in self.rest or now - self._state_at < STATE_S or self._key_lines:
            return ""
        before, self._state, self._state_at = self._state, _as_shown(self.rest), now
        return "" if self._state == before or "-----BEGIN" in self._state else self._state

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
