"""Divides the time of profiled steps: loader, operators, communication, copies and what is left.

Each share is the wall time in which at least one such span was open, so no share is longer than the steps, however many
threads and streams there are. On the host, loader, operators, communication_alone and outside add up to the steps.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

from perfagent.wire.evidence import OperatorTimes

if TYPE_CHECKING:
    from perfagent.causes.trace import Records

__all__ = ["busiest", "shares"]

Spans = list[tuple[int, int]]
"""Beginnings and ends in nanoseconds. Of what `_union` gives: in order, and apart from each other."""

_LOADER = "enumerate(DataLoader)#"
"""torch's own annotation round __next__ of every DataLoader, with workers or without."""
_COPY = "aten::copy_"
_WAIT = re.compile(r"(cuda|cu|hip)\w*Synchronize")
_COLLECTIVE = re.compile(r"(nccl|rccl|oneccl)", re.IGNORECASE)
"""Kernels of a communication library: ncclDevKernel_AllReduce_Sum_f32_RING_LL."""
_MEMCPY = {"h2d_s": "HtoD", "d2h_s": "DtoH", "d2d_s": "DtoD"}
"""As CUPTI names what runs on the device: Memcpy HtoD (Pageable -> Device)."""
_NAMED = 3


def shares(records: Records, thread: int, began: int, ended: int) -> dict[str, float]:
    """Seconds of the steps from `began` to `ended`. thread: the one that trains.

    loader_s: it waited for its batch, or loaded it; operators_s: an operator ran on the host outside of the loader;
    communication_s: collectives ran; communication_alone_s: nothing else ran meanwhile, on the device where one was used;
    copies_s: the host was copying a tensor; outside_s: none of these, so Python between operators. Where a device was
    used, also h2d_s, d2h_s, d2d_s: it copied from the host, to it, or within itself; and device_wait_s: the host waited
    for it.
    """

    def union(spans: Iterable[tuple[int, int]]) -> Spans:
        return _union((max(start, began), min(end, ended)) for start, end in spans)

    loader = union((one.start, one.end) for one in records.cpu if one.thread == thread and one.name.startswith(_LOADER))
    operators = union((one.start, one.end) for one in records.cpu if not one.annotation and not one.python)
    on_device = [one for one in records.device if _COLLECTIVE.match(one[2])]
    computed = union((start, end) for start, end, name in records.device if not _COLLECTIVE.match(name))
    on_host = union(records.collectives)
    communication = union([*on_host, *((start, end) for start, end, _ in on_device)])
    busy = union([*loader, *operators])
    whole = ended - began
    alone = _length(_union([*communication, *(beside := computed if records.device else busy)])) - _length(beside)
    found = {
        "steps_s": whole, "loader_s": _length(loader), "operators_s": _length(busy) - _length(loader),
        "communication_s": _length(communication), "communication_alone_s": alone,
        "copies_s": _length(union((one.start, one.end) for one in records.cpu if one.name.startswith(_COPY))),
        "outside_s": whole - _length(union([*busy, *on_host])),
    }  # fmt: skip
    if records.device:
        for key, kind in _MEMCPY.items():
            copied = union((start, end) for start, end, name in records.device if kind in name)
            found[key] = _length(copied)
        found["device_wait_s"] = _length(union((one.start, one.end) for one in records.cpu if _WAIT.match(one.name)))
    return {name: nanoseconds / 1e9 for name, nanoseconds in found.items()}


def _union(spans: Iterable[tuple[int, int]]) -> Spans:
    joined: Spans = []
    for start, end in sorted(span for span in spans if span[0] < span[1]):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((start, end))
    return joined


def _length(spans: Spans) -> int:
    return sum(end - start for start, end in spans)


def busiest(operators: Iterable[OperatorTimes]) -> list[OperatorTimes]:
    """The operators with the most time, on the device where one was used: of their own, and with what they call."""
    found = [one for one in operators if not one["name"].startswith(_LOADER)]
    on_device = any(one.get("self_device_s") for one in found)

    def most(key: Literal["self_cpu_s", "total_cpu_s", "self_device_s", "total_device_s"]) -> list[OperatorTimes]:
        return sorted(found, key=lambda one: one.get(key, 0.0), reverse=True)[:_NAMED]

    first = most("self_device_s" if on_device else "self_cpu_s")
    return first + [one for one in most("total_device_s" if on_device else "total_cpu_s") if one not in first]
