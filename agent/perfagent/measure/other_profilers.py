"""Finds profilers that the script itself uses.

Kineto supports one per process but does not enforce it. If a second one starts while another runs, or is only prepared,
the end of the first kills the process (segmentation fault, torch 2.13).
"""

from __future__ import annotations

import gc
import sys
from types import ModuleType
from typing import Any

__all__ = ["in_use", "starts"]


def in_use() -> bool:
    """True if a torch profiler of the script runs on any thread or is prepared. A profiler with a schedule is prepared
    from the first step of its warm-up on, and only the object itself shows that.

    25 ms for 800,000 objects: called only when somebody requests a profile.
    """
    torch = sys.modules["torch"]
    if torch.autograd._profiler_enabled():  # on this thread
        return True
    kinds = {
        *_with_subclasses(torch.autograd.profiler.profile),
        *_with_subclasses(torch.profiler.profiler._KinetoProfile),
    }
    found = [one for one in gc.get_referrers(*kinds) if type(one) in kinds]  # an instance refers to its class
    return any(_warms_up_again(one) if "profiler" in vars(one) else _is_open(one) for one in found)


def _with_subclasses(kind: Any) -> list[Any]:
    return [kind, *(one for below in kind.__subclasses__() for one in _with_subclasses(below))]


def _is_open(inner: Any) -> bool:
    """True for torch.autograd's profiler, which torch.profiler's creates for each cycle, from its start to its end."""
    held = vars(inner)
    return bool(held.get("entered")) and held.get("profiling_end_time_ns", 0) <= held.get("profiling_start_time_ns", 0)


def _warms_up_again(outer: Any) -> bool:
    """True if torch.profiler's warms up for another cycle: with `acc_events` it keeps the ended profiler of
    the cycle before."""
    held = vars(outer)
    warming_up = held.get("current_action") is sys.modules["torch"].profiler.ProfilerAction.WARMUP
    return warming_up and held.get("profiler") is not None and bool(held.get("acc_events"))


def starts() -> list[tuple[ModuleType, str]]:
    """Returns (module, name) of the functions that every profiler of torch calls when it is prepared or started."""
    own, legacy = sys.modules["torch"].autograd.profiler, sys.modules.get("torch.autograd.profiler_legacy")
    places = (own, "_prepare_profiler"), (own, "_enable_profiler"), (legacy, "_enable_profiler_legacy")
    return [(module, name) for module, name in places if module is not None and hasattr(module, name)]
