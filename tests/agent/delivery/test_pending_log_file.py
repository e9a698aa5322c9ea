"""log() without a step, before the first step: a killed process loses no call. test_drain.py shows that later rows do not wait
for these calls."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from agent_recorded import Recording
from builders import job_environment, until

from perfagent.delivery.drafts import Draft
from perfagent.delivery.segments import folders, numbered
from perfagent.delivery.spool import Header, Spool
from perfagent.device import Reading
from perfagent.step.pending_logs import EarlyLog
from perfagent.step.state import Progress

CONTEXT: list[Any] = [False, False, False, 0.0, 0.0, False]


def log(x: Any, *, age_s: float = 1.0, **more: Any) -> EarlyLog:
    return EarlyLog(time.time() - age_s, time.monotonic() - age_s, {"x": x, **more})


def settled(one: EarlyLog, step: int) -> EarlyLog:
    one.settle(step)
    return one


class Kept:
    """A spool and what it keeps of early logs."""

    def __init__(self, folder: Path, progress: Progress) -> None:
        self.progress = progress
        self.spool = Spool(folder / "s", Header(source="s", project="p", rank=0, server=None, run="r", attempt=1))
        assert self.spool.create()

    def keep(self, *logs: EarlyLog) -> None:
        self.spool.early.keep([*logs], self.progress, CONTEXT)

    def join(self, *logs: EarlyLog) -> None:
        """They have their step: the next tick holds them."""
        assert self.spool.early.joins(self.spool.header.next_tick, CONTEXT)
        self.write(*logs)

    def write(self, *logs: EarlyLog) -> None:
        """As a tick does."""
        assert self.spool.draft(Draft(CONTEXT, [log.row() for log in logs]), now=0.0)

    @property
    def files(self) -> list[Path]:
        return numbered(self.spool.folder, "early")

    def left(self) -> list[tuple[int, float]]:
        """(step, value) of everything that the next process finds after a kill now, the same if it is killed as well."""
        self.spool.abandon()
        found = []
        for _ in range(2):
            successor = Spool.open(self.spool.folder)
            outgoing = successor.next()
            groups = outgoing.groups if outgoing is not None else []
            rows = [pair for group in groups for pair in zip(group.steps(), group.column("x"), strict=True)]
            found.append((outgoing and outgoing.seq, rows))
            successor.abandon()
        assert found[0] == found[1]
        assert not self.files
        return sorted(found[0][1])


@pytest.fixture
def kept(tmp_path: Path, sender: Any) -> Kept:
    sender.progress.completed = 0
    return Kept(tmp_path, sender.progress)


def test_kill_before_the_step_is_known_leaves_the_logs(kept: Kept) -> None:
    """Under the steps that are expected: several of one step under one."""
    kept.progress.early_step = 3
    logs = [log(0.5), log(0.25), log(0.125)]
    logs[0].goes_on = True
    kept.keep(*logs[:1])
    kept.keep(*logs)
    for path in numbered(kept.spool.folder, "ticks"):
        path.unlink()
    assert folders(kept.spool.folder.parent) == [kept.spool.folder], "a folder with nothing else in it"
    assert kept.left() == [(3, 0.25), (3, 0.5), (4, 0.125)]


def test_later_rows_are_added_and_a_young_one_waits(kept: Kept) -> None:
    waiting = [log(1.0), log(2.0)]
    kept.keep(*waiting)
    size = kept.files[0].stat().st_size
    kept.keep(*waiting, log(3.0, age_s=0.0))
    assert kept.files[0].stat().st_size == size, "a fast loop writes each row once"
    kept.keep(*waiting, log(3.0))
    assert kept.left() == [(0, 1.0), (1, 2.0), (2, 3.0)]


@pytest.mark.parametrize("killed", ["before the tick", "before it is forgotten", "after that", "the disk failed"])
def test_kill_while_steps_become_known_finds_each_log_once(kept, monkeypatch, killed):
    first, second = log(0.5), log(0.25)
    kept.write(settled(log(7.0), 0))
    kept.keep(first, second)
    for each in (first, second):
        each.settle(1)
    if killed == "before the tick":
        assert kept.spool.early.joins(kept.spool.header.next_tick, CONTEXT)
        assert kept.left() == [(0, 0.5), (0, 7.0), (1, 0.25)]
        return
    kept.join(first, second)
    expected = [(0, 7.0), (1, 0.25), (1, 0.5)]
    if killed != "before it is forgotten":
        with monkeypatch.context() as failing:
            if killed == "the disk failed":
                failing.setattr(os, "unlink", fails)
            kept.spool.early.forget()
        assert bool(kept.files) is (killed == "the disk failed")
        kept.keep(log(9.0))
        expected += [(0, 9.0)]
    assert kept.left() == sorted(expected)


def fails(*_: Any, **__: Any) -> None:
    raise OSError(errno.EIO, "Input/output error")


# ---- values


def test_what_a_tick_would_store_is_kept_and_the_rest_left_to_it(kept: Kept) -> None:
    """The tick counts it."""
    kept.keep(odd := log(1.0, text="no"))
    kept.keep(odd, log(2**70))
    assert kept.left() == [(0, 1.0), (1, float(2**70))]


class Buffer:
    """Of a pool, for one value of a device at a time."""

    is_cpu = False

    def __init__(self, value: float) -> None:
        self.value = value

    def reshape(self, *_: int) -> Buffer:
        return self

    def tolist(self) -> list[float]:
        return [self.value]


class Lost:
    """The event of a device that is no more."""

    def query(self) -> bool:
        raise RuntimeError("CUDA error: device-side assert triggered")


def test_value_of_a_device_is_read_before_its_buffer_is_reused(kept: Kept) -> None:
    """And a lost device costs its own rows, and no error."""
    buffer: Any = Buffer(0.5)
    one = log(Reading(buffer, None, []))
    kept.keep(one, log(Reading(buffer, Lost(), [])))
    buffer.value = 9.0
    assert kept.left() == [(0, 0.5)]
    assert settled(one, 1).row()[3] == {"x": 0.5}


# ---- a whole process

SCRIPT = """
import os, time, torch, perfagent
from perfagent.step import pending_logs
pending_logs._EARLY_S = 600.0  # what such a log may wait for its step
run = perfagent.init()
{body}
print("ready", flush=True)
time.sleep(60)
"""
BODY = """
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
perfagent.attach(model)
for value in (0.5, 0.25):
    model(torch.ones(1, 2)).sum().backward()
    run.log({"x": value})
"""


@pytest.mark.real
@pytest.mark.fault
def test_a11_kill_9_before_the_first_step_loses_no_old_log(tmp_path: Path) -> None:
    expected = [(1, 0.25), (1, 0.5)]
    (tmp_path / "script.py").write_text(SCRIPT.format(body=BODY))
    environment = job_environment(tmp_path, PERFAGENT_RECORD=str(tmp_path / "record"), OMP_NUM_THREADS="1")
    command = [sys.executable, "script.py"]
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        try:
            until(lambda: recorded(tmp_path / "record") == expected, why="they are not written down")
        finally:
            os.kill(process.pid, signal.SIGKILL)
    assert recorded(tmp_path / "record") == expected


def recorded(folder: Path) -> list[tuple[int, float]]:
    with contextlib.suppress(OSError):  # it is being written
        return Recording(folder).series("x")
    return []
