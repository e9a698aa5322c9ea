"""Knows whether torch.compile has compiled anything in this process that may call a module."""

from __future__ import annotations

import sys
from collections.abc import Iterable

__all__ = ["compiled", "ignore_backends"]

_ignored: set[int] = set()
"""ids of backends: inductor has one backend per function."""


def compiled() -> bool:
    """True if this process used torch.compile for anything that may call a module."""
    used = getattr(sys.modules.get("torch._dynamo.eval_frame"), "cached_backends", {})
    return any(
        id(backend) not in _ignored for backend in used.values() if backend is not None
    )  # None: torch.compile is off


def ignore_backends(backends: Iterable[object]) -> None:
    """Their functions take tensors only, and call no module."""
    _ignored.update(map(id, backends))
