"""Groups the ranks of a run that stands by where their training threads are, and says which of them the others wait for.

A rank whose stack is in a collective, or in the backward pass of DDP, waits for other ranks. A rank whose stack is
elsewhere is the one that they wait for. If all ranks wait, or none does, the smallest groups are named. Pure: stacks in,
groups and a sentence out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Place", "StackGroup", "apart", "groups_of", "place_of", "said_ranks", "sentence", "shown"]

MOST_SHOWN = 8
FRAMES_SHOWN = 24
_NEAR = 12  # innermost frames in which a wait is looked for
_FRAME = re.compile(r"^(?P<file>.*?):(?P<line>\d+) in (?P<function>[^:]+)(?:: (?P<source>.*))?$")
_LIBRARY = re.compile(r"/(?:site-packages|dist-packages|python3\.\d+)(?=/)")
_OURS = re.compile(r"/perfagent/(?!demo/)")
_GENERATED = "<"
_WAITS = re.compile(
    r"torch/distributed/(?!launch|run|elastic)|deepspeed/comm/|torch/autograd/graph\.py:\d+ in _engine_run"
)
_LOADER = re.compile(r"torch/utils/data/dataloader\.py")


@dataclass(frozen=True, slots=True)
class Place:
    """The line where a thread stands. own: in the user's code, the innermost such frame; inner: the innermost frame of
    all, where that is another one."""

    own: str
    source: str
    inner: str

    def __str__(self) -> str:
        quoted = f": {self.source}" if self.source else ""
        return f"{self.own}{quoted}" + (f" (inside {self.inner})" if self.inner else "")


@dataclass(frozen=True, slots=True)
class StackGroup:
    """Ranks with one stack. waits: for other ranks; in_loader: for a batch."""

    ranks: list[int]
    frames: list[str]
    place: Place
    waits: bool
    in_loader: bool


def groups_of(stacks: Iterable[tuple[Sequence[str], Sequence[int]]]) -> list[StackGroup]:
    """The smallest group first."""
    found = [
        StackGroup(
            sorted(ranks),
            list(frames),
            place_of(frames),
            waits=any(_WAITS.search(frame) for frame in frames[-_NEAR:]),
            in_loader=any(_LOADER.search(frame) for frame in frames[-_NEAR:]),
        )
        for frames, ranks in stacks
    ]
    return sorted(found, key=lambda group: (len(group.ranks), group.ranks))


def apart(groups: Sequence[StackGroup]) -> list[StackGroup]:
    """The groups that the others wait for; empty where that cannot be told."""
    if len(groups) < 2:
        return []
    busy = [group for group in groups if not group.waits]
    if busy and len(busy) < len(groups):
        return busy
    most = groups[-1]
    return list(groups[:-1]) if 2 * len(most.ranks) > sum(len(group.ranks) for group in groups) else []


def place_of(frames: Sequence[str]) -> Place:
    """Where a stack stands; innermost frame last."""
    parsed = [match for frame in frames if (match := _FRAME.match(frame)) is not None]
    if not parsed:
        return Place(own="an unknown line", source="", inner="")
    own = next((match for match in reversed(parsed) if _is_own(match["file"])), parsed[-1])
    inner = "" if own is parsed[-1] else _spelled(parsed[-1])
    return Place(own=_spelled(own), source=(own["source"] or "")[:120], inner=inner)


def _is_own(file: str) -> bool:
    return not (file.startswith(_GENERATED) or _LIBRARY.search(file) or _OURS.search(file))


def _spelled(frame: re.Match[str]) -> str:
    """`train.py:42 in load`; of a library its path inside of that."""
    file = frame["file"]
    file = _LIBRARY.split(file)[-1].lstrip("/") if _LIBRARY.search(file) else file.rpartition("/")[2]
    return f"{file}:{frame['line']} in {frame['function'].rpartition('.')[2]}"


def said_ranks(ranks: Sequence[int]) -> str:
    """`Rank 3`, `Ranks 3 and 5`, `Ranks 1, 2, 3, 4, ... (12)`."""
    if len(ranks) == 1:
        return f"Rank {ranks[0]}"
    if len(ranks) <= 4:
        return f"Ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
    return f"Ranks {', '.join(map(str, ranks[:4]))}, ... ({len(ranks)})"


def sentence(groups: Sequence[StackGroup], culprits: Sequence[StackGroup], ranks: int) -> str:
    """Where the ranks stand, those that the others wait for first. ranks: how many the run has."""
    if not groups:
        return ""
    if len(groups) == 1:
        who = "It" if ranks == 1 else "All ranks" if len(groups[0].ranks) == ranks else said_ranks(groups[0].ranks)
        return f"{who} {'stands' if who == 'It' or len(groups[0].ranks) == 1 else 'stand'} at {groups[0].place}."
    if not culprits:
        return _listed(groups) + "."
    others = [group for group in groups if group not in culprits]
    waiting = [rank for group in others for rank in group.ranks]
    does = "wait" if len(waiting) > 1 else "waits"
    if len(others) == 1:
        who = said_ranks(waiting) if len(waiting) <= 4 else f"the other {len(waiting)} ranks"
        rest = f"{who[0].lower()}{who[1:]} {does} at {others[0].place}"
    else:
        rest = f"the other {len(waiting)} ranks {does}" if waiting else ""
    return f"{_listed(culprits)}; {rest}." if rest else f"{_listed(culprits)}."


def _listed(groups: Sequence[StackGroup]) -> str:
    said = [
        f"{said_ranks(group.ranks)} {'stand' if len(group.ranks) > 1 else 'stands'} at {group.place}"
        for group in groups[:3]
    ]
    more = len(groups) - len(said)
    return "; ".join([*said, *([f"and {more} more groups elsewhere"] if more else [])])


def shown(groups: Sequence[StackGroup]) -> list[dict[str, Any]]:
    """The groups as evidence."""
    return [
        {"ranks": group.ranks, "at": str(group.place), "waits": group.waits, "frames": group.frames[-FRAMES_SHOWN:]}
        for group in groups[:MOST_SHOWN]
    ]
