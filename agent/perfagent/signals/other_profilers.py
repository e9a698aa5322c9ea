"""Finds profilers that the script has of its own.

Kineto has room for one in a process and does not defend it. Where a second is started next to one that runs, or is only
prepared, the end of the first kills the process (segmentation fault, torch 2.13).
"""

from __future__ import annotations

import gc
import sys
from typing import Any

__all__ = ["ends", "in_use", "starts"]


def in_use() -> bool:
    """Whether a torch profiler of the script's is running, on whichever thread, or prepared: one with a schedule is from the
    first step of its warm-up on, and only the object itself shows that.

    25 ms for 800,000 objects: asked once for a profile that somebody wants.
    """
    torch = sys.modules["torch"]
    if torch.autograd._profiler_enabled():  # on this thread
        return True
    kinds = {*_with_subclasses(torch.autograd.profiler.profile), *_with_subclasses(torch.profiler.profiler._KinetoProfile)}
    found = [one for one in gc.get_referrers(*kinds) if type(one) in kinds]  # an instance refers to its class
    return any(_warms_up_again(one) if "profiler" in vars(one) else _is_open(one) for one in found)


def _with_subclasses(kind: Any) -> list[Any]:
    return [kind, *(one for below in kind.__subclasses__() for one in _with_subclasses(below))]


def _is_open(inner: Any) -> bool:
    """Of torch.autograd's profiler, which torch.profiler's makes anew for each cycle: entered, and not ended since."""
    held = vars(inner)
    return bool(held.get("entered")) and held.get("profiling_end_time_ns", 0) <= held.get("profiling_start_time_ns", 0)


def _warms_up_again(outer: Any) -> bool:
    """With `acc_events` it keeps the inner one of the cycle before, which has ended."""
    held = vars(outer)
    warming_up = held.get("current_action") is sys.modules["torch"].profiler.ProfilerAction.WARMUP
    return warming_up and held.get("profiler") is not None and bool(held.get("acc_events"))


def starts() -> list[tuple[Any, str]]:
    """(module, name) of the functions that every profiler of torch calls when it is prepared or started; of the one before Kineto
    the names end in `_legacy`."""
    return _places("_prepare_profiler", "_enable_profiler", "_enable_profiler_legacy")


def ends() -> list[tuple[Any, str]]:
    """The same of those that they call when they end."""
    return _places("_disable_profiler", "_disable_profiler_legacy")


def _places(*names: str) -> list[tuple[Any, str]]:
    own, legacy = sys.modules["torch"].autograd.profiler, sys.modules.get("torch.autograd.profiler_legacy")
    places = [(legacy if name.endswith("_legacy") else own, name) for name in names]
    return [(module, name) for module, name in places if hasattr(module, name)]
