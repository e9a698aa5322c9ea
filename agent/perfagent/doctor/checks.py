"""The result of one check, and its three grades."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Check", "Grade", "ok", "problem", "warning"]

Grade = Literal["ok", "warning", "problem"]


@dataclass(frozen=True, slots=True)
class Check:
    """name: what was looked at; found: what is there; next_step: what to do, empty where all is well."""

    name: str
    grade: Grade
    found: str
    next_step: str = ""


def ok(name: str, found: str) -> Check:
    return Check(name, "ok", found)


def warning(name: str, found: str, next_step: str) -> Check:
    """Works, and something will be missing or slower."""
    return Check(name, "warning", found, next_step)


def problem(name: str, found: str, next_step: str) -> Check:
    """Does not work as it is."""
    return Check(name, "problem", found, next_step)
