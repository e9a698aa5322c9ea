"""Measures each named part's share of the forward pass, in one step now and then: `module_share/NAME`.

The parts are the root's children, and the children of a child that holds nearly all of the model; a list of layers
counts as one part. A part within another has its own share of the whole, so only the shares of one level add up.
Models that are compiled or replicated over devices are left alone.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from perfagent.boundary.dynamo import compiled
from perfagent.device import DeviceClock, reached
from perfagent.measure.modules import ModuleTimes, Span
from perfagent.measure.tensor_storage import numbers_in

if TYPE_CHECKING:
    from torch import nn

__all__ = ["module_shares", "parts_of", "ready"]

_MOST_PARTS = 64
_NEARLY_ALL = 0.8
_DEPTH = 2


def parts_of(model: nn.Module) -> dict[str, list[nn.Module]]:
    """Returns name -> modules that are called for it; empty if the model must be left alone."""
    if compiled() or isinstance(model, sys.modules["torch"].nn.DataParallel):
        return {}
    total = _size(model)
    parts: dict[str, list[nn.Module]] = {}
    waiting = list(model.named_children())
    while waiting:
        name, module = waiting.pop(0)
        children = [(f"{name}.{inner}", child) for inner, child in module.named_children()]
        alone = not waiting and not parts and bool(children)  # a wrapper, such as DDP's `module`
        if not _has_forward(module):
            parts[name] = _called_in(module)
            continue
        if not alone:
            parts[name] = [module]
        if alone or (_size(module) > _NEARLY_ALL * total and name.count(".") < _DEPTH):
            waiting = children + waiting
    parts = {name: modules for name, modules in parts.items() if modules}
    return parts if 1 < len(parts) <= _MOST_PARTS else {}


def _has_forward(module: nn.Module) -> bool:
    """True unless the module has no forward, like a list of layers: its layers are called, and may be lists again."""
    return type(module).forward is not sys.modules["torch"].nn.Module.forward or "forward" in vars(module)


def _called_in(module: nn.Module) -> list[nn.Module]:
    parts = [[child] if _has_forward(child) else _called_in(child) for child in module.children()]
    return [part for some in parts for part in some]


def _size(module: nn.Module) -> int:
    return sum(map(numbers_in, module.parameters()))


def ready(times: ModuleTimes) -> bool:
    """True when all timed calls are over. Never blocks."""
    if not times.over:
        return False
    ends = [pair[1] for pair in times.whole]
    return all(isinstance(end, int) or reached(end) for end in ends)


def module_shares(times: ModuleTimes, clock: DeviceClock | None) -> dict[str, float]:
    """Returns `module_share/NAME` of the time in the root's calls; empty if the root was not called in that step."""
    whole = _seconds(times.whole, clock)
    seconds = {name: _seconds(spans, clock) for name, spans in times.spans.items()}
    if clock is not None:
        stamps = [stamp for spans in (times.whole, *times.spans.values()) for span in spans for stamp in span]
        clock.release([stamp for stamp in stamps if stamp is not None and not isinstance(stamp, int)])
    return {f"module_share/{name}": part / whole for name, part in seconds.items()} if whole else {}


def _seconds(spans: Sequence[Span], clock: DeviceClock | None) -> float:
    total = 0.0
    for begin, end in spans:
        if isinstance(begin, int) and isinstance(end, int):
            total += (end - begin) / 1e9
        elif clock is not None and begin is not None and end is not None:
            total += clock.seconds(begin, end) or 0.0
    return total
