"""Turns the profiler's records into what is sent: the operator table, the gaps, and the trace as a compressed file.

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
from typing import Any, NamedTuple

from perfagent.redaction import redacted_text
from perfagent.wire.evidence import Gaps, OperatorTimes

__all__ = ["Recorded", "Records", "compress", "gaps", "operators", "record"]

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
    """Of a module that is imported while Python functions are recorded, torch 2.13 keeps a name that was freed: any
    bytes."""
    try:
        return str(event.name())
    except UnicodeDecodeError as error:
        return error.object.decode(errors="replace")


def operators(cpu: list[Recorded]) -> list[OperatorTimes]:
    """The largest of self times first.

    An operator's own time is what is left without those it called. A recursive one counts each time only once in its
    total. Of Python functions, where they were recorded, those of the thread that trains count: the others mostly wait.
    """
    table: defaultdict[str, _Sums] = defaultdict(_Sums)
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
    listed = [(name, sums) for name, sums in table.items() if not name.startswith(_STEP)]
    by_total = sorted(listed, key=lambda item: -max(item[1].total_cpu, item[1].total_device))
    listed.sort(key=lambda item: -max(item[1].self_cpu, item[1].self_device))
    kept = listed[:MOST_OPERATORS]
    kept += [one for one in listed[MOST_OPERATORS:] if one in by_total[:LARGEST_TOTALS]]
    return [sums.shown(name) for name, sums in kept]


@dataclass(slots=True)
class _Sums:
    """Of one operator, in nanoseconds."""

    calls: int = 0
    self_cpu: int = 0
    total_cpu: int = 0
    self_device: int = 0
    total_device: int = 0

    def shown(self, name: str) -> OperatorTimes:
        found: OperatorTimes = {
            "name": name, "calls": self.calls, "self_cpu_s": self.self_cpu / 1e9, "total_cpu_s": self.total_cpu / 1e9,
        }  # fmt: skip
        if self.total_device:
            found |= {"self_device_s": self.self_device / 1e9, "total_device_s": self.total_device / 1e9}
        return found


@dataclass(slots=True)
class _Call:
    """An operator that is being looked through. below: CPU time of what it called; device: device time of that."""

    event: Recorded
    below: int = 0
    device: int = 0
    called: list[str] = field(default_factory=list)


def _close(open_: list[_Call], table: defaultdict[str, _Sums]) -> None:
    """The innermost operator has ended: its times go into the table and into the one that called it."""
    call = open_.pop()
    name, span = call.event.name, call.event.end - call.event.start
    device = sum(end - start for start, end in call.event.kernels)
    sums = table[name]
    # an operator whose only call is one of its own name (a number that becomes a tensor) is one call, as in torch's
    # table
    sums.calls += call.called != [name]
    sums.self_cpu += span - call.below
    sums.self_device += device
    if not any(above.event.name == name for above in open_):
        sums.total_cpu += span
        sums.total_device += device + call.device
    if open_:
        open_[-1].below += span
        open_[-1].device += device + call.device
        open_[-1].called.append(name)


def gaps(cpu: list[Recorded], device: list[tuple[int, int, str]], thread: int, began: int, ended: int) -> Gaps:
    """Where nothing ran: on the device where one was used, else on the training thread (Python between operators)."""
    tops = (one for one in cpu if one.thread == thread and not one.annotation)
    spans = device or sorted((one.start, one.end, one.name) for one in tops)
    busy, reached, last = 0, began, "the beginning"
    found: list[tuple[int, int, str, str]] = []
    for start, end, name in spans:
        if start > reached:
            found.append((start - reached, reached, last, name))
        if end > reached:
            busy += end - max(start, reached)
            reached, last = end, name
    if ended > reached:
        found.append((ended - reached, reached, last, "the end"))
    whole = max(ended - began, 1)
    idle = max(0, whole - busy)
    return {
        "of": "device" if device else "operators", "busy_s": busy / 1e9, "idle_s": idle / 1e9, "idle_pct": 100 * idle / whole,
        "longest": [
            {"s": length / 1e9, "after": after, "before": before, "at_s": (at - began) / 1e9}
            for length, at, after, before in sorted(found, reverse=True)[:MOST_GAPS]
        ],
    }  # fmt: skip


def _unquoted(name: str) -> str:
    """A name as Kineto wrote it: it leaves quotes as they are, which would end the text, and the file, too early."""
    try:
        return str(json.loads(f'"{name}"'))
    except ValueError:
        return name


def compress(source: Path, target: Path) -> tuple[int, int]:
    """The trace as gzip; what users named (annotations, Python functions) goes through redaction. Bytes before and
    after."""
    size = 0
    foreign = False
    with source.open(encoding="utf-8", errors="replace") as lines, gzip.open(target, "wb", compresslevel=5) as out:
        for count, line in enumerate(lines):
            if count % _YIELD_EVERY == 0:
                time.sleep(0)
            text = line
            if '"cat":' in line:
                foreign = not any(f'"{word}"' in line for word in _OWN_WORDS)
            elif foreign and (found := _NAME.match(line)) is not None:
                text = found[1] + json.dumps(redacted_text(_unquoted(found[2]))) + found[3]
            raw = text.encode()
            size += len(raw)
            out.write(raw)
    return size, target.stat().st_size
