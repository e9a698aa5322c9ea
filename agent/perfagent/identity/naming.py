"""The id and the default name of a run."""

from __future__ import annotations

import os
import sys
from pathlib import Path

__all__ = ["default_name", "draw_id"]

_KERNELS = ("ipykernel_launcher", "colab_kernel_launcher")


def draw_id() -> str:
    """A random run id: short enough for an address bar, 60 bits."""
    # Of 32 characters each byte is as good as another. (`secrets` may be the script's own: a file of keys beside it.)
    return "".join("0123456789abcdefghjkmnpqrstvwxyz"[byte % 32] for byte in os.urandom(12))


def default_name(run: str, started: str | None = None) -> str | None:
    """`train-2yee`: the script, or the notebook where Jupyter names it, and the head of the run's id. None at a prompt. started:
    the script, where this process is not yet the one that runs it."""
    script = Path(started or (sys.argv[0] if sys.argv else ""))
    if script.stem in _KERNELS:
        stem = Path(os.environ.get("JPY_SESSION_NAME") or "").stem  # "/" and "." have none
        script = Path(f"{stem or 'notebook'}.py")
    stem = script.parent.name if script.stem == "__main__" else script.stem  # python -m package
    return f"{stem}-{run[:4]}" if script.suffix == ".py" and stem else None
