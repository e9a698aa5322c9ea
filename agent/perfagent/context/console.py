"""Records the tail of what a script prints.

The console is watched through the `write` of the very objects that sys.stdout and sys.stderr are: they stay the same
objects, with the same type, descriptor and isatty(), and every character still goes where it went.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections import deque
from collections.abc import Callable
from threading import get_ident
from typing import TYPE_CHECKING, Any

from perfagent.context.terminal import STATE_S, Screen
from perfagent.wire.quantities import some

if TYPE_CHECKING:
    from perfagent.delivery.handoff import Handoff, Source

__all__ = ["Console"]

LINES_PER_S = 200
MOST_CHARACTERS = 2**20
"""Most text to keep between two ticks: more than LINES_PER_S lines need."""
PIECE_CHARACTERS = 200
"""What each write counts beside its text."""
_MARKER = "_perfagent_console"


class Console:
    """The tail of what the script prints, as "log" events of at most 200 lines a second; a line of ours stands
    where others are missing.

    `Console(handoff).install()`; `close()` takes everything out again. A progress bar that rewrites its line is one
    line, as on the screen, and every 10 s its state is another (terminal.py). A write by the script costs one append
    more.
    """

    def __init__(self, handoff: Handoff, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._handoff, self._clock = handoff, clock
        self._streams: list[_Stream] = []
        self._source: Source | None = None
        self._closed = False
        self._budget = float(LINES_PER_S)
        self._refilled = clock()

    def install(self) -> None:
        self._source = self._handoff.add_source(self.poll, every_s=math.inf)
        for name in ("stdout", "stderr"):
            stream = _Stream(name, getattr(sys, name, None))
            if stream.watch(self._handoff, self._source):
                self._streams.append(stream)

    def close(self) -> None:
        """Releases the streams. The rest is sent at the sender's last poll: lines are made on its thread alone."""
        for stream in self._streams:
            stream.release()
        self._closed = True

    def poll(self) -> None:
        """On the sender thread, at the tick after something was printed and while a line has no end: lines become
        events."""
        closed, now = self._closed, self._clock()
        if not any(one.pieces or one.screen.open or (closed and any(one.left_out)) for one in self._streams):
            return
        if self._source is not None:  # before the pieces are taken: what is printed after that makes it due at once
            self._source.due = time.monotonic() + STATE_S
        self._budget = min(LINES_PER_S, self._budget + LINES_PER_S * (now - self._refilled))
        self._refilled = now
        for stream in self._streams:
            lines = stream.lines(now, int(self._budget), last=closed)
            self._budget -= len(lines)
            if (lines or closed) and any(stream.left_out):
                gone, characters = stream.left_out
                stream.left_out = [0, 0]
                self._handoff.counters["log_lines_left_out"] += gone
                self._handoff.counters["log_characters_left_out"] += characters
                parts = [some(number, thing) for number, thing in ((gone, "line"), (characters, "character")) if number]
                lines = [f"[perfagent: {' and '.join(parts)} left out here]", *lines]
            if lines:
                self._handoff.event("log", {"lines": lines, "stream": stream.name})


class _Stream:
    """One of sys.stdout and sys.stderr, and the newest text that was written to it, in pieces as it came. The oldest are
    dropped where there is more than will be read.

    The limit counts characters: a limit on writes took 1.8 GB and three quarters of a core for a script that prints 100
    MB/s. Lines that are lost are not counted on the training thread: that takes 0.3 ms a megabyte.
    """

    def __init__(self, name: str, target: Any) -> None:
        self.name, self._target = name, target
        self.screen = Screen(most_lines=LINES_PER_S)
        self.pieces: deque[str] = deque()
        self.characters = 0
        """Characters in `pieces`, about: two threads count them without a lock; counted anew after each tick."""
        self._lost = 0
        self._torn = False
        self.left_out = [0, 0]
        """Lines and characters since a line of it was sent."""
        self._own: dict[str, Any] = {}
        self._before: Any = None
        self._seen: Any = None

    def watch(self, handoff: Handoff, source: Source) -> bool:
        """source: made due by each write. False where the target cannot be watched; then it is as it was.

        Our write goes straight into the target's own dict: an assignment may go to another object (tqdm's DummyTqdmFile
        hands it on to the stream that it writes to, where it would call itself for ever) and could not be taken back.
        """
        with contextlib.suppress(Exception):  # somebody else's stream may raise anything when it is looked at
            if self._target is None or getattr(self._target, _MARKER, None) is not None:
                return False
            self._seen = self._watched(self._target.write, handoff, source)
            self._own = object.__getattribute__(self._target, "__dict__")  # a text stream of the io module has one too
            self._before = self._own.get("write")
            self._own["write"] = self._own[_MARKER] = self._seen
            if self._target.write is self._seen:
                return True
        self.release()
        return False

    def _watched(self, write: Callable[..., Any], handoff: Handoff, source: Source) -> Callable[..., Any]:
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
                if not handoff.disabled and isinstance(text := args[0], str):
                    pieces.append(text)
                    self.characters += len(text) + PIECE_CHARACTERS
                    if self.characters > MOST_CHARACTERS:
                        self._thin()
                    source.due = handoff.sources_due = 0.0
            except Exception:  # noqa: BLE001, S110 - no text, no memory, no stack left: it was printed all the same
                pass
            return result

        return seen

    def _thin(self) -> None:
        """On the thread that writes. A single piece stays whole: it is the script's own text, and is held, not
        copied."""
        with contextlib.suppress(IndexError):  # the other thread takes them all at this moment
            while self.characters > MOST_CHARACTERS and len(self.pieces) > 1:
                self._torn = True  # before: the other thread may come in between
                gone = len(self.pieces.popleft())
                self.characters -= gone + PIECE_CHARACTERS
                self._lost += gone

    def lines(self, now: float, most: int, *, last: bool) -> list[str]:
        """The newest lines that are complete; what is left out is counted. last: what is not complete is a line too."""
        torn, parts = False, list[str]()
        while self.pieces:
            piece = self.pieces.popleft()
            if self._torn:  # what was taken before is not what stood before this
                self._torn, torn, parts = False, True, []
            parts.append(piece)
        text, lost = "".join(parts), self._lost
        self.characters = self._lost = 0
        gone = max(0, len(text) - MOST_CHARACTERS)
        lines = self.screen.lines(text[gone:], now, torn=torn or gone > 0, last=last)
        over = max(0, len(lines) - most)
        self.left_out[0] += self.screen.left_out + over
        self.left_out[1] += lost + gone
        self.screen.left_out = 0
        return lines[over:]

    def release(self) -> None:
        """Puts back what was there before us."""
        own = self._own
        if own.get("write") is self._seen:  # somebody else's wrapper stays
            own["write"] = self._before
            if self._before is None:
                del own["write"]
        if own.get(_MARKER) is self._seen:
            own.pop(_MARKER, None)
