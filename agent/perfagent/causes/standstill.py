"""Looks where a training stands, without being asked, once it makes no step for longer than ever before.

The first look is taken when this pause is the longest one (before the first step: after a minute), the next at twice
that, then four times. From one look to the next it is seen whether anything goes on: a thread that waits uses no
processor, and moves no bytes. A process that is stopped, or whose interpreter is held, cannot look at all: the other ranks
of this machine look for it. On the sender's thread; what is not known (no /proc) is left out.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfagent.boundary.guard import guarded
from perfagent.process.pids import machine, process_start
from perfagent.wire.evidence import ThreadStack

if TYPE_CHECKING:
    from perfagent.causes.watch import Watch

__all__ = ["FIRST_S", "Standstill", "goes_on"]

FIRST_S = 5.0
"""No look is taken sooner, nor so soon after another one."""
_STARTING_S = 60.0
"""Before the first step."""
_MOST_PASSED_S = 2.0
"""That counts from one tick to the next, of 0.2 s."""
_COMPUTES = 0.05
"""Share of a core. A thread that waits with a timeout and looks again uses a thousandth."""
_WAKES = 4.0
"""A second. A slow download is woken as often. One that sleeps, and asks every so often whether it may go on, waits."""
_MOST_PROCESSES = 256
_TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")
_CPU = slice(11, 15)
"""Places of the processor times in a stat, behind its name: of itself, and of children that have ended."""
_PROC = Path("/proc")
_AWAITS, _MAY_AWAIT = re.compile("do_wait|pidfd|pipe"), re.compile("poll|select")
"""The kernel's functions in which a thread waits for a child, or for what it writes."""
_LASTING = ("checkpoint", "eval", "rollout")


@dataclass(frozen=True, slots=True)
class Pulse:
    """What grows while anything goes on. hooks: entries of the step's trace; moved: bytes that the training thread and
    its workers read and wrote; switches: how often the training thread was woken; sleeps: it waits for a timer; is_busy:
    one of them runs now, or any thread waits for a disk; elsewhere_bytes, woken: bytes
    moved and wake-ups of everything else here but the agent and threads that wait for a timer."""

    at: float
    hooks: tuple[int, int]
    cpu_s: float
    moved: int
    switches: int
    sleeps: bool
    is_busy: bool
    elsewhere_bytes: int = 0
    woken: int = 0


def goes_on(before: Pulse, now: Pulse, *, spins: bool) -> str:
    """What went on from one look to the next: "hooks" were called, it "moves bytes", "computes"; "unsure" where a wait may
    look so, or something beside the training goes on; or nothing. spins: to wait for the device costs a core."""
    if now.hooks != before.hooks:
        return "hooks"
    if now.moved != before.moved:
        return "moves bytes"
    most = _WAKES * (now.at - before.at)
    if now.is_busy or now.cpu_s - before.cpu_s > _COMPUTES * (now.at - before.at):
        return "unsure" if spins else "computes"
    is_woken = now.switches - before.switches > most and not (before.sleeps or now.sleeps)
    is_elsewhere = now.elsewhere_bytes != before.elsewhere_bytes or abs(now.woken - before.woken) > most
    return "unsure" if is_woken or is_elsewhere else ""


class Standstill:
    """Watches the age of the last step. world: how many ranks there are."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._end = self._looks = 0
        self._age = self._quiet = self._longest = 0.0
        self._next = _STARTING_S
        self._pulse: Pulse | None = None
        self._tell_at: float | None = None
        self._ranks: dict[int, tuple[int, int]] = {}  # other ranks of this machine -> pid and its start
        self._ticks: dict[int, tuple[float, int]] = {}  # what they had computed at the last look

    def poll(self, end: int, age: float) -> None:
        """Every tick. end: of the last step, ns, 0 before the first; age: seconds since then, or since the start. A time in
        which this process could not run is no pause of the training."""
        if end != self._end:
            self._longest = max(self._longest, self._quiet) if self._end else 0.0
            self._end, self._looks, self._next = end, 0, max(FIRST_S, self._longest)
            self._pulse, self._tell_at = None, None
            self._age = self._quiet = 0.0
            self._ticks.clear()
        self._quiet += min(max(0.0, age - self._age), _MOST_PASSED_S)
        self._age, quiet = age, self._quiet
        if quiet >= self._next:
            self._next = max(2 * self._next, quiet + FIRST_S)
            self._looks += 1
            self._report_pause(quiet)
            self._tell_at = quiet + 1.0  # the stacks are on their way by then, should the recorder not answer
        elif self._tell_at is not None and quiet >= self._tell_at:
            self._tell_at = None
            from perfagent.causes.collectives import last_collectives

            if found := last_collectives():
                p = self._watch.progress
                self._watch.sender.event("collectives", {"step": p.completed, **found}, step=p.in_progress())

    @guarded
    def _report_pause(self, quiet: float) -> None:
        from perfagent.causes.stacks import all_stacks

        p, sender = self._watch.progress, self._watch.sender
        threads = all_stacks(p.thread)
        within = _within(p.phases.inside, self._watch.model()) or ("workers" if _are_starting(self._age) else "")
        pulse = None
        with contextlib.suppress(OSError, ValueError, IndexError):
            pulse = self._pulse_of(threads)
        data: dict[str, Any] = {
            "step": p.completed, "threads": threads, "look": self._looks, "quiet_s": quiet, "longest_s": self._longest,
        }  # fmt: skip
        if within:
            data["within"] = within
        if pulse is not None and self._pulse is not None:
            data["goes_on"] = goes_on(self._pulse, pulse, spins=p.clock is not None)
        self._pulse = pulse
        if sender.identity.world_size > 1:
            data["others"] = dict(self._others(self._age))
        sender.event("stacks", data, step=p.in_progress())

    def _pulse_of(self, threads: list[ThreadStack]) -> Pulse | None:
        """None where something cannot be seen; raises OSError, ValueError and IndexError there, too."""
        from perfagent.causes.stacks import OWN
        from perfagent.samplers.training_thread import native_id

        training = next((one for one in threads if one["training"]), threads[0] if threads else None)
        native = None if training is None else native_id(training["thread"])
        if training is None or native is None or "state" not in training:
            return None
        p, tasks, waits_in = self._watch.progress, _PROC / "self" / "task", training.get("waits_in", "")
        cpu_s, moved = 0.0, _bytes_of(tasks / str(native))
        busy = training["state"] == "R" or any(one.get("state") == "D" for one in threads)
        known = dict(getattr(threading, "_active", {}))  # no lock, which threading.enumerate() takes
        ours = {native, *(one.native_id for one in known.values() if one.name in OWN)}
        elsewhere_bytes = sum(_bytes_of(task) for task in tasks.iterdir() if int(task.name) not in ours)
        # of threads in C, as those of a collective's watchdog, many wake all the time
        others = [native_id(one["thread"]) for one in threads if "nanosleep" not in one.get("waits_in", "")]
        woken = sum(_switches(tasks / str(one)) for one in others if one not in (None, native))
        for child, is_worker in _below(os.getpid()):
            state, ticks = _state_of(child)
            cpu_s += ticks / _TICKS_A_SECOND
            if is_worker or _AWAITS.search(waits_in):  # what a logger's own process writes moves nothing here
                moved, busy = moved + _bytes_of(_PROC / str(child)), busy or state in ("R", "D")
            elif _MAY_AWAIT.search(waits_in) or any(_AWAITS.search(one.get("waits_in", "")) for one in threads):
                elsewhere_bytes += _bytes_of(_PROC / str(child))
        cpu_s += time.process_time() - self._watch.sender.cpu_s
        return Pulse(
            time.monotonic(), (id(p.trace), len(p.trace)), cpu_s, moved, _switches(tasks / str(native)),
            "nanosleep" in waits_in, busy, elsewhere_bytes, woken,
        )  # fmt: skip

    def _others(self, age: float) -> Iterator[tuple[str, str]]:
        """(rank, "stopped", "gone", "runs" or "stands"), of the other ranks on this machine, as the kernel has it. What a
        process has computed since the last look says whether it runs."""
        if self._looks == 1:
            self._ranks = dict(self._neighbours())
        for rank, (pid, start) in self._ranks.items():
            state, ticks = _state_of(pid)
            before, self._ticks[rank] = self._ticks.get(rank), (age, ticks)
            if not state or state in "ZX" or process_start(pid) != start:
                yield str(rank), "gone"
            elif state in "Tt":
                yield str(rank), "stopped"
            elif before is not None:
                computed = (ticks - before[1]) / _TICKS_A_SECOND > _COMPUTES * (age - before[0])
                yield str(rank), "runs" if computed or state in "RD" else "stands"

    def _neighbours(self) -> Iterator[tuple[int, tuple[int, int]]]:
        """Named by their spools; those of other hosts may lie on the same disk."""
        from perfagent.delivery.records import folders, owner

        sender, here = self._watch.sender, machine()
        mine = sender.identity
        ours = mine.run, mine.attempt, here
        for folder in folders(sender.folder.parent, max_age_s=3600.0)[-_MOST_PROCESSES:] if here else ():
            header = owner(folder, at_once=True)
            if header is not None and (header.run, header.attempt, header.machine) == ours and header.rank != mine.rank:
                yield header.rank, (header.pid, header.pid_start)


def _within(inside: str, model: Any) -> str:
    """The part of the loop that the training is in, if that may take long. Of a wrapped model, its user puts the model
    itself into the other mode."""
    evaluates = any(getattr(one, "training", True) is False for one in (model, getattr(model, "module", None)))
    return inside if inside in _LASTING else "eval" if evaluates else ""


def _are_starting(age: float) -> bool:
    """Whether workers were started after the last step, and none of them waits for a lock: an epoch begins. One that was
    forked while a thread held a lock waits for that for ever."""
    begun = time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)) - age
    with contextlib.suppress(OSError, ValueError):
        workers = [pid for pid, is_worker in _below(os.getpid()) if is_worker]
        are_new = any(process_start(pid) / _TICKS_A_SECOND > begun for pid in workers)
        return are_new and not any("futex" in _text(_PROC / str(pid) / "wchan") for pid in workers)
    return False


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
        tasks = _PROC / str(parent) / "task"
        for task in [*tasks.iterdir()] if tasks.exists() else ():
            for child in map(int, _text(task / "children").split()):
                seen += 1
                waiting.append((child, is_worker or child in workers))
                yield waiting[-1]


def _text(path: Path) -> str:
    """Empty where that process or thread has ended; raises OSError where it is there and cannot be looked at."""
    try:
        return path.read_text()
    except OSError:
        if path.parent.exists():
            raise
        return ""


def _bytes_of(path: Path) -> int:
    return sum(int(line.split()[1]) for line in _text(path / "io").splitlines()[:2])


def _switches(task: Path) -> int:
    text = _text(task / "status")
    return int(text.partition("voluntary_ctxt_switches:")[2].split()[0]) if text else 0
