"""log() calls whose step is not known yet: nothing waits behind them, and a kill before the first step loses none."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from agent_recorded import Recording
from builders import RecordingSender, job_environment, until
from case_selection import everyday

from perfagent.delivery import segments
from perfagent.delivery.columns import Columns
from perfagent.delivery.drafts import Draft
from perfagent.delivery.drain import Collector
from perfagent.delivery.row_packing import rows_in
from perfagent.delivery.segments import folders, numbered
from perfagent.delivery.spool import Header, Spool
from perfagent.device import Reading
from perfagent.governor import Governor
from perfagent.hooks.new_progress import new_progress
from perfagent.step.pending_logs import EarlyLog
from perfagent.step.state import Progress

CONTEXT: list[Any] = [False, False, False, 0.0, 0.0, False]


def log(value: float, *, age_s: float = 1.0) -> EarlyLog:
    return EarlyLog(time.time() - age_s, time.monotonic() - age_s, {"x": value})


@pytest.fixture
def progress(tmp_path: Path) -> Progress:
    return new_progress(RecordingSender(tmp_path).rows, Governor(0.5))


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    made = Spool(tmp_path / "s", Header(source="s", project="p", rank=0, server=None, run="r", attempt=1))
    assert made.create()
    return made


def files(spool: Spool) -> list[Path]:
    return numbered(spool.folder, "early")


def write(spool: Spool, *logs: EarlyLog) -> None:
    """As a tick does."""
    assert spool.draft(Draft(CONTEXT, [log.row() for log in logs]), now=0.0)


def left(spool: Spool) -> list[tuple[int, float]]:
    """(step, value) of everything that the next process finds after a kill now, the same if it is killed as well."""
    spool.abandon()
    found = []
    for _ in range(2):
        successor = Spool.open(spool.folder)
        outgoing = successor.next()
        groups = outgoing.groups if outgoing is not None else []
        found.append(
            (outgoing and outgoing.seq, [*zip(groups[0].steps(), groups[0].column("x"), strict=True)] if groups else [])
        )
        successor.abandon()
    assert found[0] == found[1]
    assert not files(spool)
    return sorted(found[0][1])


def test_a_kill_before_the_step_is_known_leaves_the_log(spool: Spool, progress: Progress) -> None:
    progress.early_step = 3
    spool.early.keep([log(0.5), log(0.25)], progress, CONTEXT)
    assert left(spool) == [(3, 0.5), (4, 0.25)]


def test_rows_that_come_later_are_added_and_a_young_one_waits(spool: Spool, progress: Progress) -> None:
    waiting = [log(1.0), log(2.0)]
    spool.early.keep(waiting, progress, CONTEXT)
    size = files(spool)[0].stat().st_size
    spool.early.keep([*waiting, log(3.0, age_s=0.0)], progress, CONTEXT)
    assert files(spool)[0].stat().st_size == size, "a fast loop writes each row once"
    spool.early.keep([*waiting, log(3.0)], progress, CONTEXT)
    assert left(spool) == [(0, 1.0), (1, 2.0), (2, 3.0)]


@pytest.mark.parametrize("killed", ["before the tick", "before it is forgotten", "after that"])
def test_a_kill_while_the_steps_become_known_finds_each_log_once(spool: Spool, progress: Progress, killed: str) -> None:
    first, second = log(0.5), log(0.25)
    write(spool, settled(log(7.0), 0))
    spool.early.keep([first, second], progress, CONTEXT)
    for each in (first, second):
        each.settle(1)
    spool.early.joins(spool.header.next_tick, CONTEXT)
    if killed != "before the tick":
        write(spool, first, second)
    if killed == "after that":
        spool.early.forget()
        spool.early.keep([log(9.0)], progress, CONTEXT)
    known = [(0, 0.5), (1, 0.25)] if killed == "before the tick" else [(1, 0.25), (1, 0.5)]
    assert left(spool) == sorted([(0, 7.0), *known, *([(0, 9.0)] if killed == "after that" else [])])


def settled(one: EarlyLog, step: int) -> EarlyLog:
    one.settle(step)
    return one


def test_a_tick_that_was_sent_is_not_found_again(spool: Spool, progress: Progress) -> None:
    one = log(0.5)
    spool.early.keep([one], progress, CONTEXT)
    one.settle(1)
    spool.early.joins(spool.header.next_tick, CONTEXT)
    write(spool, one)
    outgoing = spool.next()
    assert outgoing is not None
    spool.ack(outgoing.seq)  # killed here: the file is still there, and the tick's may be gone
    for path in numbered(spool.folder, "ticks"):
        path.unlink()
    spool.abandon()
    successor = Spool.open(spool.folder)
    assert successor.next() is None
    assert not files(successor)


def test_files_that_the_script_has_closed_are_forgotten_as_well(spool: Spool, progress: Progress) -> None:
    waiting = [log(1.0)]
    spool.early.keep(waiting, progress, CONTEXT)
    spool.files._let_go()
    spool.early.keep([*waiting, log(2.0)], progress, CONTEXT)
    assert len(files(spool)) == 2
    spool.early.forget()
    assert not files(spool)


def test_what_a_tick_holds_is_not_found_again_where_its_file_could_not_go_and_another_log_waits(
    spool: Spool, progress: Progress, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    one, two = log(0.5), log(0.25)
    spool.early.keep([one], progress, CONTEXT)
    assert spool.early.joins(spool.header.next_tick, CONTEXT)
    write(spool, settled(one, 1))
    with monkeypatch.context() as failing:
        failing.setattr(os, "unlink", fails)
        spool.early.forget()
    assert files(spool)
    spool.early.keep([two], progress, CONTEXT)
    assert left(spool) == [(0, 0.25), (1, 0.5)]


def test_logs_of_one_step_are_left_under_it(spool: Spool, progress: Progress) -> None:
    logs = [log(0.5), log(0.25), log(0.125)]
    logs[0].goes_on = True
    spool.early.keep(logs[:1], progress, CONTEXT)
    spool.early.keep(logs, progress, CONTEXT)
    assert left(spool) == [(0, 0.25), (0, 0.5), (1, 0.125)]


def test_what_is_no_number_is_left_to_the_tick_that_counts_it(spool: Spool, progress: Progress) -> None:
    odd = EarlyLog(time.time(), time.monotonic() - 1.0, {"x": 1.0, "text": "no", 3: 4.0})
    huge = EarlyLog(time.time(), time.monotonic() - 1.0, {"x": 2**70})
    spool.early.keep([odd], progress, CONTEXT)
    spool.early.keep([odd, huge], progress, CONTEXT)
    assert left(spool) == [(0, 1.0)]


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


def of_device(buffer: Any, event: Any = None) -> EarlyLog:
    reading = Reading(buffer, event, [])
    return EarlyLog(time.time(), time.monotonic() - 1.0, {"x": reading})


def test_a_value_of_a_device_is_read_once_before_another_one_has_its_buffer(spool: Spool, progress: Progress) -> None:
    buffer = Buffer(0.5)
    one = of_device(buffer)
    spool.early.keep([one], progress, CONTEXT)
    buffer.value = 9.0
    assert settled(one, 1).row()[3] == {"x": 0.5}
    assert left(spool) == [(0, 0.5)]


def test_a_lost_device_costs_its_own_rows_and_no_error(spool: Spool, progress: Progress) -> None:
    spool.early.keep([log(0.5), of_device(Buffer(1.0), Lost())], progress, CONTEXT)
    assert left(spool) == [(0, 0.5)]


def test_numbers_of_numpy_and_under_numbers_are_kept_as_a_tick_keeps_them(spool: Spool, progress: Progress) -> None:
    spool.early.keep(
        [EarlyLog(1.0, time.monotonic() - 1.0, {"x": np.float32(0.5), 3: np.array(4.0)})], progress, CONTEXT
    )
    spool.abandon()
    outgoing = Spool.open(spool.folder).next()
    assert outgoing is not None
    assert {name: [*group.column(name)] for group in outgoing.groups for name in group.values} == {
        "x": [0.5],
        "3": [4.0],
    }


def test_a_folder_with_nothing_else_in_it_is_found(spool: Spool, progress: Progress) -> None:
    spool.early.keep([log(0.5)], progress, CONTEXT)
    for path in numbered(spool.folder, "ticks"):
        path.unlink()
    assert folders(spool.folder.parent) == [spool.folder]
    assert left(spool) == [(0, 0.5)]


def test_files_that_somebody_deleted_are_written_anew(spool: Spool, progress: Progress) -> None:
    waiting = [log(0.5)]
    spool.early.keep(waiting, progress, CONTEXT)
    shutil.rmtree(spool.folder)
    spool.files._let_go()  # as it does within a second
    spool.early.keep(waiting, progress, CONTEXT)
    assert left(spool) == [(0, 0.5)]


def test_on_a_full_disk_nothing_is_sent_that_the_next_one_would_find_again(
    spool: Spool, progress: Progress, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool.early.keep([log(0.5)], progress, CONTEXT)
    spool.abandon()

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(segments, "write_whole", full)
        successor = Spool.open(spool.folder)
        assert successor.next() is None
        assert successor.counters["unreadable"] == 1
        successor.remove()  # keeps what is not delivered
    assert left(spool) == [(0, 0.5)]


def test_rows_of_which_only_some_have_their_step_rejoin_together(tmp_path: Path) -> None:
    """The training thread is in the midst of it: what is written down of them goes as a whole."""
    sender: Any = RecordingSender(tmp_path)
    sender.logged, sender.stepped, sender.counters = (0, 0, 0, 0), (0, 0), Counter()
    collector = Collector(sender, Columns(), lambda: None, lambda _: None)
    first, second = log(0.5), log(0.25)
    sender.rows.extend([first, second])
    collector.collect(0.0, last=False)
    first.settle(1)
    assert collector.collect(0.1, last=False).total == 0
    second.settle(1)
    assert collector.collect(0.2, last=False).total == 2


def test_rows_behind_one_that_waits_for_its_step_are_taken(tmp_path: Path) -> None:
    sender: Any = RecordingSender(tmp_path)
    sender.logged, sender.stepped, sender.counters = (0, 0, 0, 0), (0, 0), Counter()
    collector = Collector(sender, Columns(), lambda: None, lambda _: None)
    early = log(0.5)
    sender.rows.extend([early, (7, 5.0, 6.0, {"x": 1.0})])
    taken = collector.collect(0.0, last=False)
    assert (taken.total, collector.rejoined, collector.aside) == (1, False, [early])
    assert [row[0] for block in taken.packed for row in rows_in(block)] == [7]
    early.settle(1)
    assert collector.waits
    taken = collector.collect(0.1, last=False)
    assert (taken.total, collector.rejoined, collector.aside) == (1, True, [])
    assert [row[0] for block in taken.packed for row in rows_in(block)] == [1]
    sender.rows.append((8, 5.0, 6.0, {"x": 1.0}))
    collector.collect(0.2, last=False)
    assert sender.counters["overflows"] == 0
    assert not collector.rejoined


SCRIPT = """
import os, time, {imports} perfagent
from perfagent.step import pending_logs
pending_logs._EARLY_S = 600.0  # what such a log may wait for its step
run = perfagent.init()
{body}
print("ready", flush=True)
time.sleep(60)
"""
BODIES = {
    "no torch": ("", "run.log({'x': 0.5}); run.log({'x': 0.25})", [(0, 0.5), (1, 0.25)]),
    "before an optimizer": (
        "torch,",
        "model = torch.nn.Linear(2, 1); optimizer = torch.optim.SGD(model.parameters(), lr=0.1); perfagent.attach(model)\n"
        "for value in (0.5, 0.25): model(torch.ones(1, 2)).sum().backward(); run.log({'x': value})",
        [(1, 0.25), (1, 0.5)],
    ),
    "others behind it": (
        "torch,",
        "run.log({'x': 0.5}); [run.log({'x': 1.0}, step=step) for step in (5, 6)]",
        [(5, 1.0), (6, 1.0), (7, 0.5)],
    ),
}


@pytest.mark.fault
@pytest.mark.parametrize("case", everyday(1, BODIES))
def test_a11_kill_9_before_the_first_step_loses_no_log_older_than_200_ms(case: str, tmp_path: Path) -> None:
    imports, body, expected = BODIES[case]
    (tmp_path / "script.py").write_text(SCRIPT.format(imports=imports, body=body))
    environment = job_environment(tmp_path, PERFAGENT_RECORD=str(tmp_path / "record"), OMP_NUM_THREADS="1")
    with subprocess.Popen(
        [sys.executable, "script.py"], cwd=tmp_path, env=environment, stdout=subprocess.PIPE
    ) as process:
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
