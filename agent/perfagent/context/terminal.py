"""Turns what is written to a terminal into the lines that remain on its screen."""

from __future__ import annotations

import re

from perfagent.redaction import HIDDEN

__all__ = ["STATE_S", "Screen"]

LINE_CHARACTERS = 4000
"""Most characters of a line to keep until it is redacted, and then shortened (redaction/text.py)."""
KEY_LINES = 200
STATE_S = 10.0
"""Period of the states of lines that are being rewritten (progress bars)."""
MOST_BARS = 50
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b[@-_]")
_UP = re.compile(r"\x1b\[(\d{0,3})[AF]")


class Screen:
    """`lines(text, now)` gives the lines that are complete with this text; now: monotonic seconds.

    A line that is rewritten with carriage returns is one line. So is each of several bars that are drawn below each
    other and for which the cursor goes up again (one for epochs and one for batches; rich): a line is complete when the
    cursor did not come back to it. Every 10 s the state of such lines counts as a line. Of the lines that are complete
    at once only the last most_lines are given; `left_out` counts the others.
    """

    def __init__(self, *, most_lines: int = 1000) -> None:
        self._most_lines = most_lines
        self.left_out = 0
        self._rows = [""]
        """Rows: those that the cursor may come back to, its own, and those below."""
        self._row = 0
        self._state: list[str] = []
        self._state_at = 0.0
        self._key_lines = 0

    @property
    def open(self) -> bool:
        """Whether a line is not complete yet."""
        return self._rows != [""]

    def lines(self, text: str, now: float, *, torn: bool = False, last: bool = False) -> list[str]:
        """torn: something is missing before this text; last: what is not complete is a line too."""
        if not self._rewritten():
            self._state_at = now
        if torn:  # the end of a line alone may be the end of a secret, and hides nothing
            self._rows, self._row = [""], 0
            text = text.partition("\n")[2]
        keys = self._key_lines > 0 or any("-----BEGIN" in one for one in (*self._rows, text))
        complete = self._complete(text)
        if last:
            complete += self._rows
            self._rows, self._row = [""], 0
        older, complete = complete[: -self._most_lines], complete[-self._most_lines :]
        self.left_out += sum(map(bool, older))
        for line in older if keys else ():  # the other lines of a private key are known by its first alone
            self._without_key(line)
        lines = [self._without_key(_as_shown(line)) for line in complete]
        if lines:
            shown = self._state
            lines = ["" if at < len(shown) and line in shown else line for at, line in enumerate(lines)]
            self._state, self._state_at = [], now
        return [line for line in (*lines, *self._new_state(now)) if line]

    def _rewritten(self) -> bool:
        return len(self._rows) > 1 or "\r" in self._rows[0]

    def _complete(self, text: str) -> list[str]:
        """The lines that are complete; the others are kept, shortened."""
        first, *moves = _UP.split(text) if "\x1b[" in text else [text]
        self._write(self._rows[self._row] + first)
        complete: list[str] = []
        for rows, following in zip(moves[::2], moves[1::2], strict=True):
            self._row = max(0, self._row - int(rows or 1))
            complete += self._rows[: self._row]
            self._rows, self._row = self._rows[self._row :], 0
            self._write(_over(self._rows[0], following))
        done = max(0, self._row - MOST_BARS) if moves else self._row
        complete += self._rows[:done]
        self._rows, self._row = [*map(_kept, self._rows[done : self._row + 1 + MOST_BARS])], self._row - done
        return complete

    def _write(self, text: str) -> None:
        """text: the line in which the cursor stands, and what follows, over lines that may stand there already."""
        self._rows[self._row], *following = text.split("\n")
        below = self._rows[self._row + 1 :]
        over = [_over(old, new) for old, new in zip(below, following, strict=False)]
        self._rows[self._row + 1 :] = [*over, *following[len(below) :], *below[len(following) :]]
        self._row += len(following)

    def _new_state(self, now: float) -> list[str]:
        if not self._rewritten() or now - self._state_at < STATE_S or self._key_lines:
            return []
        shown = [_as_shown(line) for line in self._rows]
        before, self._state, self._state_at = self._state, shown, now
        return [] if any("-----BEGIN" in line for line in shown) else [line for line in shown if line not in before]

    def _without_key(self, line: str) -> str:
        """A private key has many lines; they may come in different events, and only the first shows what it is."""
        if self._key_lines:
            self._key_lines = 0 if "-----END" in line else self._key_lines - 1
            return ""
        if "PRIVATE KEY" in line and "-----BEGIN" in line and "-----END" not in line:
            self._key_lines = KEY_LINES
            return f"{line[: line.index('-----BEGIN')]}{HIDDEN}"
        return line


def _over(old: str, new: str) -> str:
    """A line that is rewritten from its beginning, perhaps in later writes. Shortened at once: a bar that is redrawn without
    pause would take quadratic time."""
    old = _kept(old)
    return f"{old}\r{new}" if old and not new.startswith("\n") else old + new


def _kept(line: str) -> str:
    """What matters of a line that is not complete."""
    if "\r" in line:  # one of them stays: it shows that the line is being rewritten
        line = line[max(line.rstrip("\r").rfind("\r"), 0) :]
    if len(line) > 2 * LINE_CHARACTERS:
        line = line[:LINE_CHARACTERS]  # its beginning is what is shown; half a secret is known by nothing
    return line


def _as_shown(line: str) -> str:
    """The line as it stands on the screen in the end: what carriage returns overwrote and colors left out."""
    line = line.rstrip("\r")
    line = line[line.rfind("\r") + 1 :]
    if "\x1b" in line:
        line = _ESCAPES.sub("", line)
    return line.rstrip()[:LINE_CHARACTERS]
