from __future__ import annotations

import math
import threading
import time
import weakref
from collections import Counter, deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from builders import RecordingSender

from perfagent.decode.step_blocks import StepPacker, Steps, count, notes_in
from perfagent.delivery.columns import Columns
from perfagent.delivery.drain import DEFERRED_S, Collector, Taken
from perfagent.delivery.row_packing import rows_in
from perfagent.device import Reading
from perfagent.governor import Governor
from perfagent.hooks.evaluation import Evaluations, Interrupted
from perfagent.hooks.new_progress import new_progress
from perfagent.step.costs import log_ns
from perfagent.step.pending_logs import EarlyLog, LoggedLater
from perfagent.step.row import Note, StepRow
from perfagent.step.state import Progress, now
from perfagent.step.trace import BACKWARD, BACKWARD_END, FORWARD, OPTIMIZER, OPTIMIZER_END, trace_of


class Event:
    """Of a device, as of torch."""

    over = False

    def query(self) -> bool:
        return self.over


class Waits:
    """A row that is not there yet."""

    def ready(self) -> bool:
        return False


@pytest.fixture
def sender(tmp_path: Path) -> Any:
    made = RecordingSender(tmp_path)
    made.logged, made.stepped, made.counters = (0, 0, 0, 0), (0, 0), Counter()  # type: ignore[attr-defined]
    return made


@pytest.fixture
def collector(sender: Any) -> Collector:
    return Collector(sender, Columns(), lambda: None, lambda _: None)


def step(number: int, loss: float = 0.5, size: int = 8, rare: Any = None, event: Any = None) -> StepRow:
    began = now()
    entries = [
        (FORWARD, now(), None, True, (size, None, False)),
        (BACKWARD, now(), None, loss, False),
        (BACKWARD_END, now(), None),
        (OPTIMIZER, now(), None),
        (OPTIMIZER_END, now(), event),
    ]
    return StepRow(number, 0.0, began, 1, 0.1, None, 0, trace_of(entries), rare)


def notes_of(taken: Taken) -> list[Note]:
    """Every step that was taken, in order."""
    return [note for row in taken.rows for note in (notes_in(row) if isinstance(row, Steps) else [row])]


def blocks_of(taken: Taken) -> list[int]:
    """How many steps each row holds: 0 for a note."""
    return [count(row) if isinstance(row, Steps) else 0 for row in taken.rows]


@pytest.mark.parametrize("value", [1.0, 2**70])
def test_a_logged_row_has_the_time_of_its_call_and_not_of_its_tick(
    sender: Any, collector: Collector, value: Any
) -> None:
    """The call reads one clock; rows may wait for minutes behind one that is still on the device."""
    sender.rows.append((1, 0.0, time.monotonic() - 100.0, {"x": 1.0, "y": value}))
    taken = collector.collect(0.0, last=False)
    ((_, wall, *_),) = [*taken.rows, *(row for block in taken.packed for row in rows_in(block))]
    assert time.time() - 105.0 < wall < time.time() - 95.0


def rows_of(taken: Taken) -> list[tuple[int, tuple[str, ...], tuple[float, ...]]]:
    """Step, names and values of what is no step."""
    return [(row[0], row[3], tuple(row[4])) for block in taken.packed for row in rows_in(block)]


def test_a_log_that_waits_for_its_device_holds_up_later_ones_and_no_other_row(
    sender: Any, collector: Collector
) -> None:
    progress = sender.progress = new_progress(sender.rows, Governor(0.5))
    progress.completed = 3
    event = Event()
    later = LoggedLater(1, 5.0, 6.0, {"x": Reading(torch.tensor([1.0]), event, [])})
    host = (2, 5.0, 6.0, ("host/cpu_pct",), (50.0,))
    sender.rows.extend([step(1), later, step(2), host, (2, 5.0, 6.5, {"x": 2.0})])
    taken = collector.collect(1.0, last=False)
    assert [note.step for note in notes_of(taken)] == [1, 2]
    assert rows_of(taken) == [(2, ("host/cpu_pct",), (50.0,))]
    assert taken.total == 3
    assert collector.waits
    event.over = True
    taken = collector.collect(2.0, last=False)
    assert rows_of(taken) == [(1, ("x",), (1.0,)), (2, ("x",), (2.0,))]
    assert taken.total == 2
    assert not collector.waits
    assert sender.stepped == (2, 2 * (len(step(1).trace) // 4))
    assert sender.logged == (2, 2, 0, 0)


def test_steps_that_wait_for_their_device_hold_up_no_other_row_and_keep_their_order(
    sender: Any, collector: Collector
) -> None:
    """Where one rank saves for minutes, or a collective hangs."""
    progress = sender.progress = new_progress(sender.rows, Governor(0.5))
    sender.reader = progress.reader
    progress.clock = SimpleNamespace(seconds=lambda begin, end: 0.0, release=lambda events: None)
    progress.completed = 3
    first, second = Event(), Event()
    second.over = True
    sender.rows.extend([step(1, event=first), (1, 5.0, 6.0, {"x": 1.0}), step(2, event=second)])
    assert rows_of(collector.collect(1.0, last=False)) == [(1, ("x",), (1.0,))]
    sender.rows.append((2, 5.0, 7.0, ("host/cpu_pct",), (50.0,)))
    assert rows_of(collector.collect(600.0, last=False)) == [(2, ("host/cpu_pct",), (50.0,))]
    first.over = True
    taken = collector.collect(601.0, last=False)
    assert [row[0] for row in rows_of(taken) if "step_time_s" in row[1] or "loss" in row[1]] == [1, 2]
    assert not sender.counters["dropped"]


def test_each_row_may_wait_as_long_as_another(sender: Any, collector: Collector) -> None:
    for second in (100.0, 130.0):
        sender.rows.append(Waits())
        assert collector.collect(second, last=False).total == 0
    collector.collect(99.0 + DEFERRED_S, last=False)
    assert not sender.counters["dropped"]
    collector.collect(101.0 + DEFERRED_S, last=False)
    assert sender.counters["dropped"] == 1
    collector.collect(131.0 + DEFERRED_S, last=False)
    assert sender.counters["dropped"] == 2
    assert not collector.waits


def test_losses_of_steps_that_never_came_are_forgotten(sender: Any, collector: Collector) -> None:
    progress = sender.progress = new_progress(sender.rows, Governor(0.5))
    progress.completed = 1001
    progress.user_losses.update(dict.fromkeys(range(1, 1003), 0.5))
    sender.rows.append(step(1000))
    (note,) = collector.collect(1.0, last=False).rows
    assert note.user_loss == 0.5
    assert [*progress.user_losses] == [1001, 1002]


def test_every_call_of_log_is_counted_with_its_values(sender: Any, collector: Collector) -> None:
    sender.rows.append((1, 0.0, 0.0, {"a": 1.0, "b": 2}))
    sender.rows.append(LoggedLater(1, 0.0, 0.0, {"c": 1.0, "text": "no number"}))
    taken = collector.collect(1.0, last=False)
    assert sender.logged == (2, 4, 0, 0)
    assert [block.names for block in taken.packed] == [("a", "b"), ("c",)]


def test_when_a_user_logged_is_worked_out_from_the_monotonic_clock(sender: Any, collector: Collector) -> None:
    unix, monotonic = time.time(), time.monotonic()
    sender.rows.extend([(1, 0.0, monotonic - 0.1, {"a": 1.0}), (2, 0.0, monotonic, {"a": 10**400})])
    taken = collector.collect(1.0, last=False)
    ((_, packed, *_),) = rows_in(taken.packed[0])
    ((_, other, *_),) = taken.rows
    assert packed == pytest.approx(unix - 0.1, abs=0.05)
    assert other == pytest.approx(unix, abs=0.05)


def test_rows_of_changing_names_keep_their_values(sender: Any, collector: Collector) -> None:
    sender.rows.extend(
        (n, 1.0, 1.0, {"a" if n % 3 else "b": float(n), **({"c": 2.0} if n % 2 else {})}) for n in range(12)
    )
    rows = [row for block in collector.collect(1.0, last=False).packed for row in rows_in(block)]
    found = {row[0]: dict(zip(row[3], row[4], strict=True)) for row in rows}
    assert found == {n: {"a" if n % 3 else "b": float(n), **({"c": 2.0} if n % 2 else {})} for n in range(12)}


@pytest.mark.parametrize(
    ("values", "pressing"), [({"loss": float("nan")}, True), ({"x": float("inf")}, False), ({"x": 2**2000}, False)]
)
def test_what_a_user_logs_presses_only_where_it_is_a_loss_or_gradient(
    sender: Any, collector: Collector, values: dict[str, Any], pressing: bool
) -> None:
    sender.rows.append((1, 0.0, 0.0, values))
    assert collector.collect(1.0, last=False).total == 1
    assert collector.pressing is pressing


class Measured:
    """What only some steps have."""

    scaled = False

    def __init__(self, **values: float) -> None:
        self._values = values

    def ready(self) -> bool:
        return True

    def add(self, values: dict[str, float], p: Progress, when: tuple[int, float, float]) -> None:
        values.update(self._values)


def packed(steps: list[StepRow]) -> list[Any]:
    """As StepPacker packs them one by one."""
    rows: list[Any] = []
    packer = StepPacker()
    for one in steps:
        packer.add(one, rows)
    packer.take(rows)
    return rows


def test_usual_steps_are_packed_as_the_packer_would(sender: Any, collector: Collector) -> None:
    progress = sender.progress = new_progress(sender.rows, Governor(0.5))
    progress.completed = 40
    steps = [step(number) for number in range(1, 31)]
    sender.rows.extend(steps)
    taken = collector.collect(1.0, last=False)
    assert taken.rows == packed(steps)
    assert blocks_of(taken) == [0, 29]
    assert notes_of(taken) == steps
    more = [step(number) for number in range(31, 36)]
    sender.rows.extend(more)
    assert blocks_of(again := collector.collect(1.1, last=False)) == [5], "what they share is known from the last tick"
    assert notes_of(again) == more


def test_steps_of_another_kind_keep_their_place(sender: Any, collector: Collector) -> None:
    progress = sender.progress = new_progress(sender.rows, Governor(0.5))
    progress.completed = 40
    steps = [step(1), step(2), step(3), step(4, size=7), step(5), step(6, loss=math.nan, rare=Measured())]
    steps += [step(7), step(8, rare=Measured(**{"grad/norm": 2.0})), step(9)]
    steps += [step(number, size=7) for number in (10, 11, 12)]
    sender.rows.extend(steps)
    taken = collector.collect(1.0, last=False)
    assert [note.step for note in notes_of(taken)] == [*range(1, 13)]
    assert blocks_of(taken) == [0, 2, 0, 1, 0, 3, 0, 2]
    assert notes_of(taken)[7].rare == {"grad/norm": 2.0}
    assert collector.pressing


def test_a_loss_that_the_user_logs_now_and_then_goes_with_its_step(sender: Any, collector: Collector) -> None:
    progress = sender.progress = new_progress(sender.rows, Governor(0.5))
    progress.completed = 40
    steps = [step(number) for number in range(1, 21)]
    progress.user_losses.update({number: float(number) for number in range(8, 13)})
    sender.rows.extend(steps)
    taken = collector.collect(1.0, last=False)
    assert [note.user_loss for note in notes_of(taken)] == [float(n) if 8 <= n < 13 else None for n in range(1, 21)]
    assert [note.step for note in notes_of(taken)] == [*range(1, 21)]


def test_a_row_of_a_device_in_between_finds_the_steps_before_it_read(sender: Any) -> None:
    """What is not plain data is read at once, and so are the steps before it: in their order."""
    order: list[str] = []
    collector = Collector(sender, Columns(), lambda: order.append("drafts"), lambda _: None)
    progress = sender.progress = new_progress(sender.rows, Governor(0.5))
    progress.completed = 40
    progress.account.evaluations = Evaluations()
    sender.reader = progress.reader
    evaluated = step(3)
    evaluated = evaluated._replace(trace=Interrupted(evaluated.trace))
    sender.rows.extend([step(1), step(2), evaluated, step(4), step(5)])
    taken = collector.collect(1.0, last=False)
    read = [row[0] for row in taken.rows if len(row) == 5]
    assert read == [1, 2], "they are not read after it"
    assert [row[0] for block in taken.packed for row in rows_in(block)] == [3]
    later = [row for row in taken.rows if len(row) != 5]
    assert [note.step for note in notes_of(Taken(later, [], 0))] == [4, 5]
    assert order == ["drafts"]


def test_a_step_that_cannot_be_looked_at_costs_itself_and_no_other(sender: Any, collector: Collector) -> None:
    progress = sender.progress = new_progress(sender.rows, Governor(0.5))
    progress.completed = 40
    sender.rows.extend([step(1), step(2)._replace(trace=[1, 2, 99]), step(3)])
    taken = collector.collect(1.0, last=False)
    assert [note.step for note in notes_of(taken)] == [1, 3]
    assert sender.counters["dropped"] == 1
    assert not sender.rows


# ---- rows that came too fast


@pytest.fixture
def bounded(sender: Any) -> Any:
    sender.rows = deque(maxlen=1000)
    return sender


def logs(count: int) -> list[tuple[Any, ...]]:
    return [(n, 1.0, 1.0, {"a": 1.0}) for n in range(count)]


@pytest.mark.parametrize("burst", [0, 1, 998, 999, 1000, 1001, 1002, 2500, 10_007])
@pytest.mark.parametrize("before", [0, 10])
def test_every_row_that_a_burst_drops_is_counted(bounded: Any, burst: int, before: int) -> None:
    new_progress(bounded.rows, Governor(0.5))
    collector = Collector(bounded, Columns(), lambda: None, lambda _: None)
    taken = 0
    for handed in (before, burst, 3, burst):
        for row in logs(handed):
            bounded.rows.append(row)
        taken += collector.collect(1.0, last=False).total
    while collector.waits:
        taken += collector.collect(1.0, last=False).total
    assert taken + bounded.counters["overflows"] == before + 2 * burst + 3
    if burst < 999:
        assert bounded.counters["overflows"] == 0
    assert not collector.waits


def test_rows_that_were_dropped_before_the_first_was_taken_are_counted(bounded: Any) -> None:
    """The sender's thread imports what it needs while a script logs already."""
    new_progress(bounded.rows, Governor(0.5))
    for row in logs(5000):
        bounded.rows.append(row)
    collector = Collector(bounded, Columns(), lambda: None, lambda _: None)
    assert collector.collect(1.0, last=False).total + bounded.counters["overflows"] == 5000


def test_rows_dropped_while_others_are_taken_are_counted(bounded: Any) -> None:
    """Two threads, as in a training: of what was handed in each row was taken or counted."""
    new_progress(bounded.rows, Governor(0.5))
    collector = Collector(bounded, Columns(), lambda: None, lambda _: None)
    handed = 300_000
    append = bounded.rows.append

    def burst() -> None:
        for row in logs(handed):
            append(row)

    thread = threading.Thread(target=burst)
    thread.start()
    taken = 0
    while thread.is_alive() or collector.waits:
        taken += collector.collect(1.0, last=False).total
        thread.join(1e-3)
    assert bounded.counters["overflows"] > 0, "too slow to drop any"
    assert taken + bounded.counters["overflows"] == pytest.approx(handed, abs=20), (
        "a row more or less where threads meet"
    )


def test_rows_that_are_let_go_of_leave_nothing_behind(bounded: Any) -> None:
    """In a forked child, and where the agent is switched off."""
    new_progress(bounded.rows, Governor(0.5))
    bounded.rows.append(logs(1)[0])
    bounded.rows.clear()
    assert not bounded.rows
    gone = weakref.ref(bounded.rows)
    bounded.rows = None
    assert gone() is None


def test_a_loop_that_logs_hundreds_of_times_a_step_loses_none_to_politeness(
    sender: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pause lets a training thread that computes in Python go on for 5 ms: 200 rows at 40 000 a second. More of them
    came during the pauses than were taken between them, and of 197 000 rows 118 000 were dropped."""
    rows = sender.rows = deque(maxlen=5000)
    collector = Collector(sender, Columns(), lambda: None, lambda _: None)
    given = 0

    def train(count: int) -> None:
        nonlocal given
        for _ in range(count):
            rows.append((given, 1.0, float(given), {"a": 1.0}))
            given += 1

    monkeypatch.setattr("perfagent.delivery.wakeup.time.sleep", lambda _: train(200))
    taken = 0
    for _ in range(10):
        train(3000)
        taken += collector.collect(1.0, last=False).total
    monkeypatch.undo()
    taken += collector.collect(1.0, last=True).total
    assert not sender.counters["overflows"]
    assert taken == given > 30_000, "it gave way now and then"


def test_calls_right_behind_another_are_counted_apart(sender: Any, collector: Collector) -> None:
    """200 calls in a loop take 0.8 µs each and not the 3.7 of one between two operations: 14.8 % was told where it was
    6.8."""
    moments = [10.0, 10.000004, 10.000009, 10.5, 10.500004]
    sender.rows.extend((1, 0.0, moment, {"a": 1.0, "b": 2.0}) for moment in moments[:2])
    collector.collect(1.0, last=False)
    sender.rows.extend((1, 0.0, moment, {"a": 1.0, "b": 2.0}) for moment in moments[2:])
    collector.collect(2.0, last=False)
    assert sender.logged == (2, 4, 3, 6)
    assert log_ns(1, 2, 199, 398) < log_ns(200, 400) / 3


def test_the_newest_step_is_the_highest_that_came_and_stays_so(sender: Any, collector: Collector) -> None:
    sender.rows.extend([(7, 5.0, 6.0, {"x": 1.0}), (5, 5.0, 6.0, {"x": 1.0})])
    collector.collect(0.0, last=False)
    assert collector.newest == 7
    sender.rows.append((3, 5.0, 6.0, {"x": 1.0}))
    collector.collect(0.1, last=False)
    assert collector.newest == 7
    sender.rows.append(LoggedLater(9, 5.0, 6.0, {"x": 1.0}))
    collector.collect(0.2, last=False)
    assert collector.newest == 9


def test_at_the_end_a_log_without_its_step_is_counted_and_one_that_has_it_is_taken(
    sender: Any, collector: Collector
) -> None:
    settled, waits, comes_last = (EarlyLog(5.0, 6.0, {"x": 1.0}) for _ in range(3))
    sender.rows.extend([settled, waits])
    assert collector.collect(0.0, last=False).total == 0
    settled.settle(3)
    sender.rows.append(comes_last)
    taken = collector.collect(0.1, last=True)
    assert [row[0] for block in taken.packed for row in rows_in(block)] == [3]
    assert sender.counters["dropped"] == 2
    assert not collector.aside


def test_a_log_whose_value_is_not_there_yet_waits_behind_one_that_rejoins(sender: Any, collector: Collector) -> None:
    event = Event()
    first = EarlyLog(5.0, 6.0, {"x": 1.0})
    second = EarlyLog(5.0, 6.0, {"x": Reading(torch.tensor([2.0]), event, [])})
    sender.rows.extend([first, second])
    collector.collect(0.0, last=False)
    first.settle(1)
    second.settle(1)
    assert collector.collect(0.1, last=False).total == 1
    event.over = True
    taken = collector.collect(0.2, last=False)
    assert [(row[0], *row[4]) for block in taken.packed for row in rows_in(block)] == [(1, 2.0)]
    assert not sender.counters["dropped"]
