"""The result of one check, and its three grades."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Check"]


@dataclass(frozen=True, slots=True)
class Check:
    """name: what was checked; grade: a warning works, and something will be missing or slower; found: what is there; next_step:
    what to do, empty where all is well."""

    name: str
    grade: Literal["ok", "warning", "problem"]
    found: str
    next_step: str = ""
