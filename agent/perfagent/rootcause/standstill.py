"""Looks where a training stands, without being asked, once it makes no step for longer than ever before.

The first look is taken when this pause is the longest one, the next at twice that, then four times: a training that
stands for an hour is looked at ten times. From one look to the next it is seen whether anything goes on. A thread that
waits uses no processor, and moves no bytes; code that runs is no hang. A process that is stopped, or whose interpreter
is held, cannot look at all: the other ranks of this machine look for it. On the sender's thread; what is not known
(no /proc) is left out.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfagent.pids import process_start
from perfagent.rootcause.containment import contained

if TYPE_CHECKING:
    from perfagent.rootcause.investigator import Investigator

__all__ = ["FIRST_S", "Standstill", "goes_on"]

FIRST_S = 5.0
"""No look is taken sooner, nor so soon after another one."""
_COMPUTES = 0.05
"""Share of a core. A thread that waits with a timeout and looks again uses a thousandth."""
_WAKES = 4.0
"""A second. A slow download is woken as often. One that sleeps, and asks every so often whether it may go on, waits."""
_MOST_PROCESSES = 256
_TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")
_CPU = slice(11, 15)
"""Places of the processor times in a stat, behind its name: of itself, and of children that have ended."""
_PROC = Path("/proc")
_LASTING = ("checkpoint", "eval", "rollout")


@dataclass(frozen=True, slots=True)
class Pulse:
    """What grows while anything goes on. hooks: entries of the step's trace; moved: bytes that the training thread and
    its workers read and wrote; switches: how often the training thread was woken; sleeps: it waits for a timer; is_busy:
    one of them runs now, or waits for a disk."""

    at: float
    hooks: tuple[int, int]
    cpu_s: float
    moved: int
    switches: int
    sleeps: bool
    is_busy: bool


def goes_on(before: Pulse, now: Pulse, *, lasting: bool, spins: bool) -> str:
    """What went on from one look to the next: "hooks" saw something of the loop, it "moves bytes", "computes", "wakes";
    "unsure" where a wait may look so; empty for nothing. lasting: in a part of the loop that may take long, a thread
    that was woken counts; spins: to wait for the device costs a core."""
    if now.hooks != before.hooks:
        return "hooks"
    if now.moved != before.moved:
        return "moves bytes"
    passed, woken = now.at - before.at, now.switches - before.switches
    if now.is_busy or now.cpu_s - before.cpu_s > _COMPUTES * passed:
        return "unsure" if spins else "computes"
    if lasting and woken:
        return "wakes"
    return "unsure" if woken > _WAKES * passed and not (before.sleeps or now.sleeps) else ""


class Standstill:
    """Watches the age of the last step. world: how many ranks there are."""

    def __init__(self, investigator: Investigator) -> None:
        self._investigator = investigator
        self._end = self._looks = 0
        self._age = self._longest = 0.0
        self._next = FIRST_S
        self._pulse: Pulse | None = None
        self._tell_at: float | None = None
        self._ranks: dict[int, tuple[int, int]] = {}  # other ranks of this machine -> pid and its start
        self._ticks: dict[int, tuple[float, int]] = {}  # what they had computed at the last look

    def poll(self, end: int, age: float) -> None:
        """Every tick. end: when the last step ended, ns; age: seconds since then."""
        if end != self._end:
            self._longest = max(self._longest, self._age)
            self._end, self._looks, self._next = end, 0, max(FIRST_S, self._longest)
            self._pulse, self._tell_at = None, None
            self._ticks.clear()
        self._age = age
        if age >= self._next:
            self._next = max(2 * self._next, age + FIRST_S)
            self._looks += 1
            self._look(age)
            self._tell_at = age + 1.0  # the stacks are on their way by then, should the recorder not answer
        elif self._tell_at is not None and age >= self._tell_at:
            self._tell_at = None
            self._tell_collectives()

    @contained
    def _look(self, age: float) -> None:
        from perfagent.rootcause.stacks import all_stacks

        p, sender = self._investigator.progress, self._investigator.sender
        threads = all_stacks(p.thread)
        within = _within(p.inside, self._investigator.model()) or ("workers" if _are_starting(age) else "")
        pulse = self._take_pulse(threads)
        data: dict[str, Any] = {
            "step": p.completed, "threads": threads, "look": self._looks, "quiet_s": age, "longest_s": self._longest,
        }  # fmt: skip
        if within:
            data["within"] = within
        if pulse is not None and self._pulse is not None:
            data["goes_on"] = goes_on(self._pulse, pulse, lasting=within in _LASTING, spins=p.clock is not None)
        self._pulse = pulse
        if sender.identity.world_size > 1:
            data["others"] = {str(rank): state for rank, state in self._others(age)}
        sender.event("stacks", data, step=p.in_progress())

    def _tell_collectives(self) -> None:
        from perfagent.rootcause.collectives import last_collectives

        p = self._investigator.progress
        found = last_collectives()
        if found:
            self._investigator.sender.event("collectives", {"step": p.completed, **found}, step=p.in_progress())

    def _take_pulse(self, threads: list[dict[str, Any]]) -> Pulse | None:
        training = next((one for one in threads if one["training"]), threads[0] if threads else None)
        native = None if training is None else _native_id(training["thread"])
        if training is None or native is None or "state" not in training:
            return None
        p, task = self._investigator.progress, _PROC / "self" / "task" / str(native)
        cpu_s, moved, busy = 0.0, _bytes_of(task), training["state"] in "RD"
        awaits_any, sleeps = (what in training.get("waits_in", "") for what in ("do_wait", "nanosleep"))
        for child, is_worker in _below(os.getpid()):
            state, ticks = _state_of(child)
            cpu_s += ticks / _TICKS_A_SECOND
            if is_worker or awaits_any:  # what a logger's own process writes moves nothing here
                moved, busy = moved + _bytes_of(_PROC / str(child)), busy or state in ("R", "D")
        cpu_s += time.process_time() - self._investigator.sender.cpu_s
        return Pulse(time.monotonic(), (id(p.trace), len(p.trace)), cpu_s, moved, _switches(task), sleeps, busy)

    def _others(self, age: float) -> Iterator[tuple[int, str]]:
        """(rank, "stopped", "gone", "runs" or "stands"), of the other ranks on this machine, as the kernel has it. What a
        process has computed since the last look says whether it runs."""
        if self._looks == 1:
            self._ranks = dict(self._neighbours())
        for rank, (pid, start) in self._ranks.items():
            state, ticks = _state_of(pid)
            before, self._ticks[rank] = self._ticks.get(rank), (age, ticks)
            if not state or state in "ZX" or process_start(pid) != start:
                yield rank, "gone"
            elif state in "Tt":
                yield rank, "stopped"
            elif before is not None:
                computed = (ticks - before[1]) / _TICKS_A_SECOND > _COMPUTES * (age - before[0])
                yield rank, "runs" if computed or state in "RD" else "stands"

    def _neighbours(self) -> Iterator[tuple[int, tuple[int, int]]]:
        """Their spools name them."""
        from perfagent.delivery.segments import folders, owner

        sender = self._investigator.sender
        mine = sender.identity
        for folder in folders(sender.folder.parent, max_age_s=3600.0)[-_MOST_PROCESSES:]:
            header = owner(folder) if folder != sender.folder else None
            if (
                header is not None
                and (header.run, header.attempt) == (mine.run, mine.attempt)
                and header.rank != mine.rank
            ):
                yield header.rank, (header.pid, header.pid_start)


def _within(inside: str, model: Any) -> str:
    """The part of the loop that the training is in, if that may take long. Of a wrapped model, its user puts the model
    itself into the other mode."""
    evaluates = any(getattr(one, "training", True) is False for one in (model, getattr(model, "module", None)))
    return inside if inside in _LASTING else "eval" if evaluates else ""


def _are_starting(age: float) -> bool:
    """Whether workers were started after the last step, and none of them waits for a lock: an epoch begins. One that was
    forked while a thread held a lock waits for that for ever."""
    workers = [pid for pid, is_worker in _below(os.getpid()) if is_worker]
    begun = time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)) - age
    if not any(process_start(pid) / _TICKS_A_SECOND > begun for pid in workers):
        return False
    with contextlib.suppress(OSError):
        return not any("futex" in (_PROC / str(pid) / "wchan").read_text() for pid in workers)
    return True


def _native_id(ident: int) -> int | None:
    return getattr(getattr(threading, "_active", {}).get(ident), "native_id", None)


def _state_of(pid: int) -> tuple[str, int]:
    """Its state, and the ticks that it and its ended children have computed; ("", 0) if it is gone."""
    try:
        fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
        return fields[0], sum(map(int, fields[_CPU]))
    except (OSError, ValueError, IndexError):
        return "", 0


def _below(pid: int) -> Iterator[tuple[int, bool]]:
    """The processes that this one has started, and those that they have; whether multiprocessing started them."""
    module = sys.modules.get("multiprocessing.process")
    workers = {getattr(getattr(one, "_popen", None), "pid", None) for one in [*getattr(module, "_children", ())]}
    waiting, seen = [(pid, False)], 0
    while waiting and seen < _MOST_PROCESSES:
        parent, is_worker = waiting.pop()
        with contextlib.suppress(OSError, ValueError):
            for task in (_PROC / str(parent) / "task").iterdir():
                for child in map(int, (task / "children").read_text().split()):
                    seen += 1
                    waiting.append((child, is_worker or child in workers))
                    yield waiting[-1]


def _bytes_of(path: Path) -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        read, written, *_ = (path / "io").read_text().splitlines()
        return int(read.split()[1]) + int(written.split()[1])
    return 0


def _switches(task: Path) -> int:
    with contextlib.suppress(OSError, ValueError):
        for line in (task / "status").read_text().splitlines():
            if line.startswith("voluntary_ctxt_switches"):
                return int(line.split()[1])
    return 0
