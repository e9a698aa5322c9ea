"""What projects, runs and sources may be called: names that stand in one line, and in the address of a page."""

from __future__ import annotations

__all__ = ["identity_problem"]

_LENGTHS = {"project": 256, "run": 128, "source": 64}  # characters, as in the server's tables
_NOT_IN_ADDRESSES = frozenset("/\\?#%")


def identity_problem(kind: str, value: str) -> str | None:
    """Why this cannot be a project, run or source (`kind`); None if it can."""
    length = _LENGTHS[kind]
    if 0 < len(value) <= length and value.isprintable() and not value.isspace() and (kind != "run" or _fits_an_address(value)):
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
