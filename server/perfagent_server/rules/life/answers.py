"""What the ranks of a run that stands tell, by themselves or asked: where their training threads are, which collectives
they called last, and whether anything goes on there. Condensed as it arrives: a stack is kept once for all ranks that share it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from perfagent_server.rules.rule import Rule
from perfagent_server.rules.window import Noted, Window

__all__ = ["Answers", "Look", "training_thread"]

_MOST_FRAMES = 40
_MOST_STACKS = 16
_MOST_GROUPS = 64
_KINDS = ("stacks", "collectives")
_PATIENCE_S = 3.0
"""So long after the first answer the ranks that have not answered are not waited for: they send at once."""


@dataclass(frozen=True, slots=True)
class Look:
    """The newest look that an agent took by itself, as it tells it (docs/reference/wire.md). came: when, by the window's clock;
    waits_in: the kernel's function in which the training thread waits; others: other ranks on its machine."""

    number: int
    came: float
    quiet_s: float
    longest_s: float
    within: str
    goes_on: str
    waits_in: str
    others: dict[str, str]

    @property
    def is_still(self) -> bool:
        """Whether nothing goes on there, as two looks have shown."""
        return self.number > 1 and not self.goes_on and not self.within


class Answers:
    """Those that came since the newest step of a run ended. Kept in the state of the rule that reads the events."""

    def __init__(self, window: Window, rule: Rule) -> None:
        fresh = {"step": -1, "since": {}, "stacks": [], "collectives": [], "taken": {}, "looks": {}}
        self._window = window
        self._state = state = window.state_of(rule, {}).setdefault("answers", fresh)
        if state["step"] != window.step:
            state.update(step=window.step, since={}, stacks=[], collectives=[], looks={})
        for kind in _KINDS:
            self._take(kind, window.events(kind))

    def _take(self, kind: str, events: Sequence[Noted]) -> None:
        """Each event once: the window shows the newest for as long as no other comes."""
        if not events:
            return
        newest = events[-1]
        if self._state["taken"].get(kind) == [newest.rank, newest.time]:
            return
        self._state["taken"][kind] = [newest.rank, newest.time]
        self._state["since"].setdefault(kind, self._window.now)
        if kind == "stacks":
            thread = training_thread(newest.data.get("threads"))
            self._add_stack(newest.rank, [str(frame)[:400] for frame in thread.get("frames", ())[-_MOST_FRAMES:]])
            self._add_look(newest.rank, newest.data, thread)
        else:
            groups, complete = newest.data.get("groups"), newest.data.get("complete") is True
            kept = [entry for entry in self._state["collectives"] if entry[0] != newest.rank]
            usable = [one for one in groups if _is_usable(one)][:_MOST_GROUPS] if isinstance(groups, list) else []
            self._state["collectives"] = [*kept, [newest.rank, usable, complete]]

    def _add_stack(self, rank: int, frames: list[str]) -> None:
        stacks = self._state["stacks"]
        for _, ranks in stacks:
            if rank in ranks:
                ranks.remove(rank)
        stacks[:] = [entry for entry in stacks if entry[1]]
        known = next((entry for entry in stacks if entry[0] == frames), None)
        if known is not None:
            known[1] = sorted([*known[1], rank])
        elif frames and len(stacks) < _MOST_STACKS:
            stacks.append([frames, [rank]])

    def _add_look(self, rank: int, data: dict[str, Any], thread: dict[str, Any]) -> None:
        number, quiet, longest = (data.get(name) for name in ("look", "quiet_s", "longest_s"))
        is_told = all(isinstance(one, (int, float)) and math.isfinite(one) for one in (quiet, longest))
        if not isinstance(number, int) or not is_told:
            return
        # without what goes on, nobody knows: as if something did
        told = data.get("within") or "", data.get("goes_on", "unsure"), thread.get("waits_in") or ""
        words, others = [str(one)[:64] for one in told], data.get("others")
        known = [*others.items()][:_MOST_GROUPS] if isinstance(others, dict) else []
        near = {str(other): str(state) for other, state in known}
        self._state["looks"][str(rank)] = [number, self._window.now, quiet, longest, *words, near]

    def looks(self) -> dict[int, Look]:
        """The newest of each rank that has taken one."""
        return {int(rank): Look(*told) for rank, told in self._state["looks"].items()}

    def stacks(self) -> list[tuple[list[str], list[int]]]:
        """(frames, innermost last; the ranks whose training thread is there); empty while ranks are waited for."""
        answered = {rank for _, ranks in self._state["stacks"] for rank in ranks}
        told = self._state["stacks"] if self._all_in("stacks", answered) else []
        return [(frames, list(ranks)) for frames, ranks in told]

    def collectives(self) -> list[tuple[int, list[dict[str, Any]], bool]]:
        """(rank, its groups, whether these are all that it ever called); empty while ranks are waited for."""
        answered = {rank for rank, _, _ in self._state["collectives"]}
        told = self._state["collectives"] if self._all_in("collectives", answered) else []
        return [(rank, groups, complete) for rank, groups, complete in told]

    def _all_in(self, kind: str, answered: set[int]) -> bool:
        window, since = self._window, self._state["since"].get(kind)
        if since is None:
            return False
        return window.heard - window.done - window.lost.keys() <= answered or window.now - since >= _PATIENCE_S


def training_thread(threads: Any) -> dict[str, Any]:
    """The thread that trains, else the main thread, with a list of frames; a sender may have sent anything."""
    known = [one for one in threads if isinstance(one, dict)] if isinstance(threads, list) else []
    for which in ("training", "main"):
        for thread in known:
            if thread.get(which) is True and isinstance(thread.get("frames"), list):
                return thread
    return {}


def _is_usable(group: Any) -> bool:
    """Whether a group of an answer has what is read of it."""
    if not isinstance(group, dict) or not isinstance(group.get("group"), str):
        return False
    recent = group.get("recent")
    named = isinstance(recent, list) and all(
        isinstance(one, list) and len(one) == 2 and isinstance(one[0], int) and isinstance(one[1], str)
        for one in recent
    )
    return named and isinstance(group.get("seq"), int)
