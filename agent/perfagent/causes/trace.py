"""Turns the profiler's records into what is sent: the operator table, the gaps, how the time of the steps is divided, and
the trace as a compressed file.

Runs on the sender's thread. torch's own table (`key_averages`) takes three seconds for 45,000 events, most of it
holding the interpreter; one pass over the raw events with a stack a thread gives the same sums in a tenth of a second.
"""

from __future__ import annotations

import gzip
import json
import re
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

from perfagent.redaction import redacted_text
from perfagent.wire.evidence import Gaps, OperatorTimes

__all__ = ["Records", "busiest", "compress", "gaps", "operators", "record", "shares"]

MOST_OPERATORS = 100
LARGEST_TOTALS = 20
"""Also listed: those that take the most with what they call, however little of it is their own."""
MOST_GAPS = 20
_STEP = "ProfilerStep#"
_YIELD_EVERY = 5000  # events, after which the interpreter is offered to the training thread
_OWN_WORDS = (
    "cpu_op", "kernel", "fwdbwd", "ac2g", "cuda_runtime", "cuda_driver", "gpu_memcpy", "gpu_memset", "Trace", "overhead",
)  # fmt: skip
_CALL = re.compile("(cuda|cu|hip)[A-Z]")
"""A call of the runtime's or the driver's, by its name: cudaLaunchKernel, cuLaunchKernelEx."""
_HOST_COLLECTIVE = re.compile("(gloo|mpi|ucc):")
"""A collective as its backend records it, on its own thread: gloo:all_reduce."""
_PYTHON = re.compile(r"\.py\(\d+\): |^<built-in |^nn\.Module: ")
"""The name of a Python function's event."""
_USER_SCOPE = 7  # of record_function, as torch numbers what opens an event
_NAME = re.compile(r'^(\s*"name": )"(.*)"(,?\s*)$', re.DOTALL)


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


@dataclass(slots=True)
class Recorded:
    """One event, as far as it counts. python: a Python function; kernels: (start, end) of what it started on a
    device."""

    name: str
    start: int
    end: int
    thread: int
    annotation: bool
    python: bool = False
    kernels: list[tuple[int, int]] = field(default_factory=list)


class Records(NamedTuple):
    """cpu: the operators of the CPU, each with what it started on a device; device: everything that ran on a device
    (start, end, name); collectives: when those of a backend on the host ran."""

    cpu: list[Recorded]
    device: list[tuple[int, int, str]]
    collectives: list[tuple[int, int]]


def record(events: Iterable[Any]) -> Records:
    """Sorts the raw events of Kineto."""
    found = Records([], [], [])
    by_correlation: dict[int, Recorded] = {}
    calls: list[tuple[Recorded, int]] = []  # of CUDA's library, with the number of the operator that made each
    kernels: list[tuple[int, int, int]] = []
    for count, event in enumerate(events):
        if count % _YIELD_EVERY == 0:
            time.sleep(0)
        name, span, linked = _name_of(event), _span(event), event.linked_correlation_id()
        if not str(event.device_type()).endswith("CPU"):
            if not _is_annotation(event):
                kernels.append((*span, linked))
                found.device.append((*span, name))
        elif not event.is_async():
            one = Recorded(name, *span, event.start_thread_id(), _is_annotation(event), _is_python(event))
            found.cpu.append(one)
            if linked:
                calls.append((one, linked))
            # those have numbers of their own, which begin at 1, too
            elif event.correlation_id() and not _CALL.match(name):
                by_correlation[event.correlation_id()] = one
        elif _HOST_COLLECTIVE.match(name):
            found.collectives.append(span)
    for call, linked in calls:
        if (caller := by_correlation.get(linked)) is not None:
            call.thread = caller.thread  # Kineto and torch count threads in different ways
    for start, end, linked in kernels:
        if linked and (starter := by_correlation.get(linked)) is not None:
            starter.kernels.append((start, end))
    found.device.sort()
    return found


def _span(event: Any) -> tuple[int, int]:
    start = event.start_ns()
    return start, event.end_ns() if hasattr(event, "end_ns") else start + event.duration_ns()  # torch 2.4


def _is_annotation(event: Any) -> bool:
    known = getattr(event, "is_user_annotation", None)
    return bool(event.scope() == _USER_SCOPE if known is None else known())  # torch 2.4


def _is_python(event: Any) -> bool:
    known = getattr(event, "is_python_function", None)
    return _PYTHON.search(_name_of(event)) is not None if known is None else bool(known())  # up to torch 2.10


def _name_of(event: Any) -> str:
    """The name of an event. torch 2.13 answers freed memory, any bytes, for a module that is imported while Python
    functions are recorded."""
    try:
        return str(event.name())
    except UnicodeDecodeError as error:
        return error.object.decode(errors="replace")


def operators(cpu: list[Recorded]) -> list[OperatorTimes]:
    """The largest of self times first.

    An operator's own time is what is left without those it called. A recursive one counts each time only once in its
    total. Of Python functions, where they were recorded, those of the thread that trains count: the others mostly wait.
    """
    table: dict[str, OperatorTimes] = {}
    training = {one.thread for one in cpu if one.annotation and one.name.startswith(_STEP)}
    threads: defaultdict[int, list[Recorded]] = defaultdict(list)
    for one in cpu:
        if not one.python or one.thread in training:
            threads[one.thread].append(one)
    for mine in threads.values():
        open_: list[_Call] = []
        for event in sorted(mine, key=lambda one: (one.start, -one.end)):
            while open_ and open_[-1].event.end <= event.start:
                _close(open_, table)
            open_.append(_Call(event))
        while open_:
            _close(open_, table)
    listed = [times for name, times in table.items() if not name.startswith(_STEP)]
    by_total = sorted(listed, key=lambda one: -max(one["total_cpu_s"], one.get("total_device_s", 0.0)))
    listed.sort(key=lambda one: -max(one["self_cpu_s"], one.get("self_device_s", 0.0)))
    return listed[:MOST_OPERATORS] + [one for one in by_total[:LARGEST_TOTALS] if one not in listed[:MOST_OPERATORS]]


@dataclass(slots=True)
class _Call:
    """An operator that is being looked through. below: CPU time of what it called; device: device time of that."""

    event: Recorded
    below: int = 0
    device: int = 0
    called: list[str] = field(default_factory=list)


def _close(open_: list[_Call], table: dict[str, OperatorTimes]) -> None:
    """The innermost operator has ended: its times go into the table and into the one that called it."""
    call = open_.pop()
    name, span = call.event.name, call.event.end - call.event.start
    device = sum(end - start for start, end in call.event.kernels)
    times = table.setdefault(name, {"name": name, "calls": 0, "self_cpu_s": 0.0, "total_cpu_s": 0.0})
    # an operator whose only call is one of its own name (a number that becomes a tensor) is one call, as in torch's
    # table
    times["calls"] += call.called != [name]
    times["self_cpu_s"] += (span - call.below) / 1e9
    is_outermost = not any(above.event.name == name for above in open_)
    times["total_cpu_s"] += is_outermost * span / 1e9
    if device or call.device:
        times["self_device_s"] = times.get("self_device_s", 0.0) + device / 1e9
        times["total_device_s"] = times.get("total_device_s", 0.0) + is_outermost * (device + call.device) / 1e9
    if open_:
        open_[-1].below += span
        open_[-1].device += device + call.device
        open_[-1].called.append(name)


def gaps(cpu: list[Recorded], device: list[tuple[int, int, str]], thread: int, began: int, ended: int) -> Gaps:
    """Where nothing ran: on the device where one was used, else on the training thread (Python between operators)."""
    tops = (one for one in cpu if one.thread == thread and not one.annotation)
    spans = device or sorted((one.start, one.end, one.name) for one in tops)
    busy, reached, last = 0, began, ""
    found: list[tuple[int, int, str, str]] = []
    for start, end, name in spans:
        if start > reached:
            found.append((start - reached, reached, last, name))
        if end > reached:
            busy += end - max(start, reached)
            reached, last = end, name
    if ended > reached:
        found.append((ended - reached, reached, last, ""))
    whole = max(ended - began, 1)
    idle = max(0, whole - busy)
    return {
        "of": "device" if device else "operators", "busy_s": busy / 1e9, "idle_s": idle / 1e9, "idle_pct": 100 * idle / whole,
        "longest": [
            {"s": length / 1e9, "after": after, "before": before, "at_s": (at - began) / 1e9}
            for length, at, after, before in sorted(found, reverse=True)[:MOST_GAPS]
        ],
    }  # fmt: skip


def shares(records: Records, thread: int, began: int, ended: int) -> dict[str, float]:
    """Seconds of the steps from `began` to `ended` in which at least one such span was open. thread: the one that trains.
    On the host, loader, operators, communication_alone and outside add up to the steps.

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


def _unquoted(name: str) -> str:
    """A name as Kineto wrote it: it leaves quotes as they are, which would end the text, and the file, too early."""
    try:
        return str(json.loads(f'"{name}"'))
    except ValueError:
        return name


def compress(source: Path, target: IO[bytes]) -> int:
    """Writes the trace as gzip; what users named (annotations, Python functions) goes through redaction. Returns the bytes
    before."""
    size, foreign = 0, False
    with source.open(encoding="utf-8", errors="replace") as lines, gzip.open(target, "wb", compresslevel=5) as out:
        for count, line in enumerate(lines):
            if count % _YIELD_EVERY == 0:
                time.sleep(0)
            text = line
            if '"cat":' in line:
                foreign = not any(f'"{word}"' in line for word in _OWN_WORDS)
            elif foreign and (found := _NAME.match(line)) is not None:
                text = found[1] + json.dumps(redacted_text(_unquoted(found[2]))) + found[3]
            size += out.write(text.encode())
    return size
