"""Torch's light recording of operators, on one thread, for one call of the training's own; broken off where it would do harm.

Torch has room for one profiler a thread: a script that starts its own in the midst of the call would be refused. And torch asks
every operator's tensors for their shapes, which nested ones have not: it prints a page for each operator then.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable
from itertools import chain, islice
from threading import get_ident
from typing import Any

from perfagent.hooks.guard import untraced
from perfagent.rootcause.other_profilers import starts
from perfagent.rootcause.replacing import replace

__all__ = ["Recording", "holds_nested"]

_MAKE_NESTED = ("nested_tensor", "as_nested_tensor", "nested_tensor_from_jagged", "narrow", "masked_select")
_MOST_ITEMS = 64


class Recording:
    """One that has begun. broken_off: a profiler of the script's started, or the script made a nested tensor."""

    def __init__(self, *, compiled: bool) -> None:
        """compiled: what torch.compile may trace stays as it is."""
        torch = sys.modules["torch"]
        self.broken_off = False
        self._thread = get_ident()
        makers = () if compiled else [(torch.nested, name) for name in _MAKE_NESTED if hasattr(torch.nested, name)]
        self._undo = [replace(module, name, self._break_off) for module, name in (*starts(), *makers)]
        profiler = torch._C._profiler
        config = profiler.ProfilerConfig(
            profiler.ProfilerState.CPU, True, False, False, False, False, profiler._ExperimentalConfig()
        )
        try:
            torch._C._autograd._enable_profiler_legacy(config)
        except BaseException:
            self._put_back()
            raise

    @untraced
    def end(self) -> list[list[Any]]:
        """What each thread recorded; empty where it was broken off."""
        self._put_back()
        autograd = sys.modules["torch"]._C._autograd
        if self.broken_off and autograd._profiler_type().name != "LEGACY":  # ended in a backward pass it is there again behind it
            return []
        recorded: list[list[Any]] = autograd._disable_profiler_legacy()
        return [] if self.broken_off else recorded

    def _put_back(self) -> None:
        for undo in reversed(self._undo):
            undo()

    def _break_off(self, *_: Any, **__: Any) -> None:
        if self._thread == get_ident() and not self.broken_off:  # of another thread nothing is recorded
            self.broken_off = True
            with contextlib.suppress(Exception):
                sys.modules["torch"]._C._autograd._disable_profiler_legacy()


def holds_nested(args: Iterable[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a call is given nested tensors, or there are some whose rows lie in one tensor: torch numbers their lengths, and
    those of one of its own."""
    own: Any = sys.modules.get("torch.nested._internal.nested_tensor")
    if len(getattr(own, "_tensor_symint_registry", ())) > 1:
        return True
    for given in chain(args, kwargs.values()):
        items = given.values() if isinstance(given, dict) else given if isinstance(given, (list, tuple)) else (given,)
        if any(getattr(item, "is_nested", False) is True for item in islice(items, _MOST_ITEMS)):
            return True
    return False
