"""The limits on a frame's content: identities that fit into an address, names, steps, and how many names a run may
have.

A frame with a bad identity is refused as a whole (WireError). Samples with a bad name or step, and events that are wrong
are left out and counted, and the rest of the frame is stored: one odd metric must not cost the others. A
frame of too many events or groups is sent again in halves.
"""

from __future__ import annotations

from typing import Literal

from perfagent.errors import WireError
from perfagent.wire.frame import MAX_NAME_BYTES, Frame
from perfagent.wire.loss_names import is_evaluation_loss, loss_kind
from perfagent.wire.metrics import CATALOGUE, FAMILIES

__all__ = [
    "MAX_COUNT", "MAX_EVENTS", "MAX_GROUPS", "MAX_NAMES_PER_RUN", "MAX_STEP", "MOST_LEFT_OUT", "check_frame", "identity_problem",
    "name_problem", "room_of", "size_problem", "whole",
]  # fmt: skip

MAX_EVENTS = 10_000
"""Most events of a frame. An agent sends some hundred a minute; each costs the one thread that writes some 20 µs."""
MAX_GROUPS = 10_000
"""Most groups of a frame. An agent puts rows of the same names into one group, so it sends a few dozen."""

MAX_NAMES_PER_RUN = 2000
"""In each room (`room_of`) but the catalogue's, which has no limit."""
MOST_LEFT_OUT = 10_000
"""Names for which a run has no room are counted so far, and no further."""
MAX_COUNT = 2**31 - 1
"""Most processes, and highest of their ids: the largest that a 32-bit column holds."""
MAX_STEP = 2**53  # JSON numbers, and so the page, hold no larger integer exactly
_LENGTHS = {"project": 256, "run": 128, "source": 64}  # characters, as in the server's tables
_NOT_IN_ADDRESSES = frozenset("/\\?#%")


def identity_problem(kind: str, value: str) -> str | None:
    """Why this cannot be a project, run or source (`kind`); None if it can."""
    length = _LENGTHS[kind]
    if (
        0 < len(value) <= length
        and value.isprintable()
        and not value.isspace()
        and (kind != "run" or _fits_an_address(value))
    ):
        return None
    if not value.strip():
        return f"{kind} is {'blank' if value else 'empty'}; 1 to {length} characters are allowed"
    if len(value) > length:
        return f"{kind} has {len(value)} characters; 1 to {length} are allowed"
    bad = [character for character in value if not character.isprintable() or character in _NOT_IN_ADDRESSES]
    holds = f"holds {bad[0]!r}" if bad else "is the name of a folder"
    return f"{kind} {value!r:.80} {holds}; letters, digits and -_.:@+= are always fine"


def _fits_an_address(run: str) -> bool:
    return _NOT_IN_ADDRESSES.isdisjoint(run) and run not in (".", "..")


def check_frame(frame: Frame) -> None:
    """Raises WireError if the frame cannot be stored at all."""
    for field in ("project", "run", "source"):
        problem = identity_problem(field, getattr(frame, field))
        if problem is not None:
            raise WireError(problem)
    if not 0 <= frame.attempt <= MAX_STEP or not 0 <= frame.rank < 2**31 or not 1 <= frame.seq <= MAX_STEP:
        raise WireError(
            "attempt, rank and seq must be whole numbers from 0 up to 2**53 (rank: 2**31; seq: from 1), "
            f"not {frame.attempt}, {frame.rank}, {frame.seq}"
        )


def size_problem(frame: Frame) -> str | None:
    """Why a frame is too much for one transaction, whatever its bytes; None if it is not."""
    for what, given, allowed in (("events", len(frame.events), MAX_EVENTS), ("groups", len(frame.groups), MAX_GROUPS)):
        if given > allowed:
            return f"the frame has {given} {what}; {allowed} are allowed: send several smaller frames"
    return None


def whole(value: object, most: int = MAX_STEP) -> int | None:
    """A step, rank or count in an event, or None where it is no whole number that the tables and pages can hold."""
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if 0 <= value <= most else None


def room_of(name: str) -> Literal["catalogue", "rules", "user"]:
    """In which room of a run's names this one takes a place, so that no name of one room pushes out a name of another.

    catalogue: there is always a place. rules: families of the catalogue, phases and losses, which rules read. user: all
    other names.
    """
    if name in CATALOGUE:
        return "catalogue"
    group = name.partition("/")[0] + "/"
    if group in FAMILIES or group == "phase/" or group.startswith("node_gpu"):
        return "rules"
    # Without the first test a hundred thousand names of a user would fill the caches of the two others.
    is_loss = "loss" in name.lower() and (loss_kind(name) == "whole" or is_evaluation_loss(name))
    return "rules" if is_loss else "user"


def name_problem(name: str) -> str | None:
    """Why this cannot be the name of a series; None if it can."""
    if not name:
        return "the name is empty"
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        return "the name is not valid Unicode"
    if size > MAX_NAME_BYTES:
        return f"the name has {size} bytes; {MAX_NAME_BYTES} are allowed"
    if not name.isprintable():
        return "the name holds control characters"
    return None
