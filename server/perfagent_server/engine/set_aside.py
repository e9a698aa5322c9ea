"""Runs that the rules cannot judge for now: each is shown as such, tried again after growing pauses, and holds up no other.

A run is set aside if its evaluator cannot be loaded, or fails frame after frame. The cause is a stored row or a frame that
nobody foresaw, or a fault of ours. The run leaves the memory of the rules thread. Its row of state says up to which
frame it was judged (Mark), so that a later try, of this server or the next one, judges what came since, as far as the
tail still holds it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from perfagent.wire import Finding
from perfagent_server.timestamps import rfc3339

__all__ = ["MOST_FAILING", "RULES_STOPPED", "CannotJudgeError", "Mark", "SetAside"]

RULES_STOPPED = "rules_stopped"
"""The rule id of what the server says of itself."""
MOST_FAILING = 5
"""So many frames in a row that cannot be judged, or looks by the clock, are no trouble of the frames."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 10.0, 600.0


class CannotJudgeError(Exception):
    """A run is set aside, and its verdict is asked for. The text is why."""


class Mark(msgspec.Struct):
    """The row of state of a run that is set aside. upto: the tail id up to which it was judged."""

    upto: int
    error: str

    def row(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def read(cls, state: bytes) -> Mark:
        """Of one that cannot be read, what the tail still holds is judged again, to the same alerts."""
        try:
            return msgspec.msgpack.decode(state, type=cls)
        except (msgspec.DecodeError, TypeError):
            return cls(0, "its row of state cannot be read")


@dataclass(slots=True)
class _Aside:
    """since: Unix seconds; due: when it is tried again, monotonic; frames: those that came meanwhile."""

    error: str
    since: float
    pause_s: float
    due: float
    frames: int = 0


class SetAside:
    """The runs that are set aside. clock: Unix seconds, to say when; monotonic: measures the pauses."""

    def __init__(self, clock: Callable[[], float], monotonic: Callable[[], float]) -> None:
        self._clock, self._monotonic = clock, monotonic
        self._runs: dict[str, _Aside] = {}

    def __len__(self) -> int:
        return len(self._runs)

    def __contains__(self, run: object) -> bool:
        return run in self._runs

    def names(self) -> list[str]:
        return list(self._runs)

    def add(self, run: str, error: str) -> bool:
        """Sets a run aside, or sets its next try; whether it is new here."""
        known, now = self._runs.get(run), self._monotonic()
        if known is None:
            self._runs[run] = _Aside(error, self._clock(), _FIRST_PAUSE_S, now + _FIRST_PAUSE_S)
            return True
        known.error, known.pause_s = error, min(2 * known.pause_s, _LONGEST_PAUSE_S)
        known.due = now + known.pause_s
        return False

    def remember(self, run: str, error: str) -> None:
        """A server before this one has set it aside: it is tried at once."""
        self.add(run, error)
        self.hurry(run)

    def hurry(self, run: str | None = None) -> None:
        """Tries a run, or all, with the next round: its rules have changed."""
        for name in [run] if run is not None else list(self._runs):
            if name in self._runs:
                self._runs[name].due = self._monotonic()

    def due(self) -> list[str]:
        now = self._monotonic()
        return [run for run, one in list(self._runs.items()) if one.due <= now]

    def note_frame(self, run: str) -> None:
        if run in self._runs:
            self._runs[run].frames += 1

    def note_waiting(self, run: str, waiting: int) -> int:
        """So many of its frames the tail still holds; how many it has lost."""
        known = self._runs.get(run)
        lost = 0 if known is None else max(0, known.frames - waiting)
        if known is not None:
            known.frames -= lost
        return lost

    def note_judged(self, run: str) -> None:
        if run in self._runs:
            self._runs[run].frames -= 1

    def remove(self, run: str) -> bool:
        """It is judged again, or deleted; whether it was here."""
        return self._runs.pop(run, None) is not None

    def shown(self) -> list[dict[str, Any]]:
        """What GET /self lists."""
        return [
            {"run": run, "error": one.error, "since": rfc3339(one.since), "next_try": rfc3339(self._next(one))}
            for run, one in list(self._runs.items())
        ]

    def finding(self, run: str, error: str = "") -> Finding:
        """The verdict of a run that is set aside, here, or by the server that judges it (error)."""
        known = self._runs.get(run)
        again = "" if known is None else f"; trying again at {rfc3339(self._next(known))[11:16]} UTC"
        said = f"The rules cannot judge this run: {error if known is None else known.error}{again}."
        return Finding(
            rule=RULES_STOPPED,
            severity="critical",
            title="The rules cannot judge this run",
            message=f"{said} No alert of this run fires until then.",
            fix="This is a fault of perfagent or of what it has stored, not of the training. The server's log has the whole "
            "error: upgrade perfagent, or report it. What the run sends is stored, and judged as soon as it can be.",
            evidence={} if known is None else {"error": known.error, "since": rfc3339(known.since)},
        )

    def _next(self, one: _Aside) -> float:
        return self._clock() + max(0.0, one.due - self._monotonic())
