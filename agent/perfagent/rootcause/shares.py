"""Divides the time of profiled steps: loader, operators, communication, copies and what is left; and says it in words.

Each share is the wall time in which at least one such span was open, so no share is longer than the steps, however many
threads and streams there are. On the host, loader, operators, communication_alone and outside add up to the steps.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from perfagent.plural import some

if TYPE_CHECKING:
    from perfagent.rootcause.trace import Records

__all__ = ["sentences", "shares"]

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
_WORTH_SAYING = 0.005
"""Of the steps; less is noise."""


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

    def host(*names: str) -> Spans:
        return union((one.start, one.end) for one in records.cpu if one.name.startswith(names))

    loader = union((one.start, one.end) for one in records.cpu if one.thread == thread and one.name.startswith(_LOADER))
    operators = union((one.start, one.end) for one in records.cpu if not one.annotation and not one.python)
    on_device = [one for one in records.device if _COLLECTIVE.match(one[2])]
    computed = union((start, end) for start, end, name in records.device if not _COLLECTIVE.match(name))
    on_host = union(records.collectives)
    communication = union([*on_host, *((start, end) for start, end, _ in on_device)])
    busy = union([*loader, *operators])
    whole = ended - began
    found = {
        "steps_s": whole,
        "loader_s": _length(loader),
        "operators_s": _length(busy) - _length(loader),
        "communication_s": _length(communication),
        "communication_alone_s": _without(communication, computed if records.device else busy),
        "copies_s": _length(host(_COPY)),
        "outside_s": whole - _length(union([*busy, *on_host])),
    }
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


def _without(spans: Spans, others: Spans) -> int:
    """How long the first are open and the others are not. Both as `_union` gives them."""
    return _length(_union([*spans, *others])) - _length(others)


def sentences(summary: Mapping[str, Any]) -> list[str]:
    """What a summary with `shares`, `gaps` and `operators` says, the most important first."""
    found = summary["shares"]
    whole = found["steps_s"]
    if not whole > 0:
        return []
    return [
        one for one in (_where(summary), _waits(found), _communication(found), _copies(found), _top(summary)) if one
    ]


def _where(summary: Mapping[str, Any]) -> str:
    found, gaps = summary["shares"], summary["gaps"]
    count = some(summary["last_step"] - summary["first_step"] + 1, "step")
    parts = [
        (found["loader_s"], "in the data loader"),
        (found["operators_s"], "in operators"),
        (found["communication_alone_s"] if gaps["of"] == "operators" else 0.0, "in communication alone"),
        (found["outside_s"], "in Python between operators"),
    ]
    worth = [(s, where) for s, where in parts if s >= _WORTH_SAYING * found["steps_s"]]
    said = ", ".join(f"{_share(s, found)} {where}" for s, where in sorted(worth, key=lambda one: -one[0]))
    idle = f" The device was idle for {gaps['idle_pct']:.0f} % of it." if gaps["of"] == "device" else ""
    return f"Of {_ms(found['steps_s'])} for {count}, the host spent {said}.{idle}"


def _waits(found: Mapping[str, float]) -> str:
    waited = found.get("device_wait_s", 0.0)
    if waited < _WORTH_SAYING * found["steps_s"]:
        return ""
    return f"The host waited {_ms(waited)} ({_share(waited, found)}) for the device in calls that synchronize."


def _communication(found: Mapping[str, float]) -> str:
    took, alone = found["communication_s"], found["communication_alone_s"]
    if not took:
        return ""
    return f"Communication took {_ms(took)} ({_share(took, found)}), {_ms(alone)} of it while nothing else ran."


def _copies(found: Mapping[str, float]) -> str:
    if "h2d_s" in found:
        to, back = found["h2d_s"], found["d2h_s"]
        if not to and not back:
            return ""
        return f"Copies took {_ms(to)} ({_share(to, found)}) to the device and {_ms(back)} ({_share(back, found)}) from it."
    took = found["copies_s"]
    return f"Copies of tensors took {_ms(took)} ({_share(took, found)})." if took else ""


def _top(summary: Mapping[str, Any]) -> str:
    """The operators with the most time, on the device where one was used: their own, and with what they call."""
    operators = [row for row in summary["operators"] if not row["name"].startswith(_LOADER)]
    side = "device" if any(row.get("self_device_s") for row in operators) else "cpu"
    said = []
    for kind, words in (("self", "Most time of their own"), ("total", "with what they call")):
        key = f"{kind}_{side}_s"
        rows = sorted(operators, key=lambda row: -row.get(key, 0.0))[:_NAMED]
        named = ", ".join(f"{row['name'][:60]} ({_ms(row[key])})" for row in rows if row.get(key))
        if named:
            said.append(f"{words}: {named}")
    return f"{'; '.join(said)}." if said else ""


def _share(seconds: float, found: Mapping[str, float]) -> str:
    share = 100 * seconds / found["steps_s"]
    return f"{share:.0f} %" if share >= 1 else f"{share:.1f} %"


def _ms(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"
