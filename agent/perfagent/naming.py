"""The rules for names of projects, runs and sources (they must fit into a line and into a page's address), and the
default name of a run.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

__all__ = ["default_name", "draw_id", "identity_problem"]

_LENGTHS = {"project": 256, "run": 128, "source": 64}  # characters, as in the server's tables
_NOT_IN_ADDRESSES = frozenset("/\\?#%")
_KERNELS = ("ipykernel_launcher", "colab_kernel_launcher")


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


def draw_id() -> str:
    """A random run id: short enough for an address bar, 60 bits."""
    # Of 32 characters each byte is as good as another. (`secrets` may be the script's own: a file of keys beside it.)
    return "".join("0123456789abcdefghjkmnpqrstvwxyz"[byte % 32] for byte in os.urandom(12))


def default_name(run: str, started: str | None = None) -> str | None:
    """`train-2yee`: the script, or the notebook where Jupyter names it, and the head of the run's own id. None at a
    prompt.

    started: the script, where this process is not yet the one that runs it.
    """
    script = Path(started or (sys.argv[0] if sys.argv else ""))
    if script.stem in _KERNELS:
        stem = Path(os.environ.get("JPY_SESSION_NAME") or "").stem  # "/" and "." have none
        script = Path(f"{stem or 'notebook'}.py")
    stem = script.parent.name if script.stem == "__main__" else script.stem  # python -m package
    return f"{stem}-{run[:4]}" if script.suffix == ".py" and stem else None
