"""Groups the ranks of a run that hangs by where their training threads are, and finds those that the others wait for.

A rank whose stack is in a collective, or in the backward pass of DDP, waits for other ranks. A rank whose stack is
elsewhere is the one that they wait for. If all ranks wait, or none does, the smallest groups are named. Pure: stacks in,
groups out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Place", "StackGroup", "apart", "groups_of", "place_of", "shown", "waits_for"]

_MOST_WITH_FRAMES = 8
_MOST_FRAMES = 24
_NEAR = 12  # innermost frames in which a wait is looked for
_FRAME = re.compile(r"^(?P<file>.*?):(?P<line>\d+) in (?P<function>[^:]+)(?:: (?P<source>.*))?$")
_LIBRARY = re.compile(r"/(?:site-packages|dist-packages|python3\.\d+)(?=/)")
_OURS = re.compile(r"/(?:site-packages|dist-packages|agent)/perfagent(?:_loop)?/")
_GENERATED = "<"
_WAITS = re.compile(
    r"torch/distributed/(?!launch|run|elastic)|deepspeed/comm/|torch/autograd/graph\.py:\d+ in _engine_run"
)
_LOADER = re.compile(r"torch/utils/data/dataloader\.py")
_PAUSES = re.compile(  # activation checkpointing, and the frame below which compiled code runs, are none
    r"(?![^:]*torch/(?:utils/checkpoint|_dynamo/eval_frame)\.py)[^:]*(?:torch/serialization\.py|torch/distributed/checkpoint/|"
    r"safetensors|torch/_(?:dynamo|inductor|functorch)/|multiprocessing/popen_|"  # a worker is started
    r":\d+ in (?:.*gc\.collect\(|(?:[\w<>.]+\.)?(?:_|do_|run_|maybe_)*(?:save|checkpoint|evaluat|valid|eval_|test_|compile)))"
)
_WAITED_FOR = {
    "lock": re.compile("futex"), "pipe": re.compile("pipe"), "child": re.compile("do_wait|pidfd"),
    "socket": re.compile("unix_|inet|tcp|sk_|sock"), "timer": re.compile("nanosleep"), "files": re.compile("poll|select"),
}  # fmt: skip
"""By the kernel's function in which a thread waits (/proc/PID/wchan)."""


@dataclass(frozen=True, slots=True)
class Place:
    """The line where a thread stands. own: in the user's code, the innermost such frame; inner: the innermost frame of
    all, where that is another one. is_users: whether any frame is in the user's code."""

    own: str
    source: str
    inner: str
    is_users: bool = False

    def __str__(self) -> str:
        quoted = f": {self.source}" if self.source else ""
        return f"{self.own}{quoted}" + (f" → {self.inner}" if self.inner else "")


@dataclass(frozen=True, slots=True)
class StackGroup:
    """Ranks with one stack. waits: for other ranks; in_loader: for a batch; pauses: it saves, evaluates, compiles, starts
    workers or collects garbage, which may take long."""

    ranks: list[int]
    frames: list[str]
    place: Place
    waits: bool
    in_loader: bool
    pauses: bool


def groups_of(stacks: Iterable[tuple[Sequence[str], Sequence[int]]]) -> list[StackGroup]:
    """The smallest group first."""
    found = [
        StackGroup(
            sorted(ranks),
            list(frames),
            place_of(frames),
            waits=any(_WAITS.search(frame) for frame in frames[-_NEAR:]),
            in_loader=any(_LOADER.search(frame) for frame in frames[-_NEAR:]),
            pauses=any(_PAUSES.match(frame) for frame in frames[-_NEAR:]),
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


def waits_for(kernel: str) -> str:
    """What a thread waits for; empty where that is not known."""
    return next((what for what, known in _WAITED_FOR.items() if known.search(kernel)), "")


def place_of(frames: Sequence[str]) -> Place:
    """Where a stack stands; innermost frame last."""
    parsed = [match for frame in frames if (match := _FRAME.match(frame)) is not None]
    if not parsed:
        return Place(own="?", source="", inner="")
    users = [match for match in parsed if _is_own(match["file"])]
    own = (users or parsed)[-1]
    innermost = next((match for match in reversed(parsed) if not _OURS.search(match["file"])), own)
    inner = "" if own is innermost else _spelled(innermost)
    return Place(own=_spelled(own), source=(own["source"] or "")[:120], inner=inner, is_users=bool(users))


def _is_own(file: str) -> bool:
    return not (file.startswith(_GENERATED) or _LIBRARY.search(file) or _OURS.search(file))


def _spelled(frame: re.Match[str]) -> str:
    """`train.py:42 in load`; of a library its path inside of that."""
    file = frame["file"]
    file = _LIBRARY.split(file)[-1].lstrip("/") if _LIBRARY.search(file) else file.rpartition("/")[2]
    return f"{file}:{frame['line']} in {frame['function'].rpartition('.')[2]}"


def shown(groups: Sequence[StackGroup], culprits: Sequence[StackGroup] = ()) -> list[dict[str, Any]]:
    """The groups as evidence, those that the others wait for first."""
    ordered = sorted(groups, key=lambda group: group not in culprits)
    return [
        {
            "kind": "waits" if group.waits else "stands", "ranks": group.ranks, "at": str(group.place),
            "waits": group.waits, "frames": group.frames[-_MOST_FRAMES:] if place < _MOST_WITH_FRAMES else [],
        }
        for place, group in enumerate(ordered)
    ]  # fmt: skip
