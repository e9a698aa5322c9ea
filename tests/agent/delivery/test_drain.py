from __future__ import annotations

import math
import time
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from progress import new_progress

from perfagent.delivery.columns import Columns
from perfagent.delivery.drain import Collector
from perfagent.delivery.row_packing import Packed, rows_in
from perfagent.device import Reading
from perfagent.step.pending_logs import EarlyLog, LoggedLater
from perfagent.step.row import AfterLastStep, OccasionalValues, OptimizerGradients, StepRow
from perfagent.step.state import now
from perfagent.step.trace import BACKWARD, BACKWARD_END, FORWARD, OPTIMIZER, OPTIMIZER_END, trace_of


class Event:
    """Of a device, as of torch; lost: the device was."""

    def __init__(self, *, lost: bool = False) -> None:
        self.over, self.lost = False, lost

    def query(self) -> bool:
        if self.lost:
            raise RuntimeError("CUDA error: device lost")
        return self.over


def step(number: int, loss: float = 0.5, size: int = 8, rare: Any = None, event: Any = None) -> StepRow:
    began = now()
    entries = [
        (FORWARD, now(), None, True, (size, None, False)),
        (BACKWARD, now(), None, loss, False),
        (BACKWARD_END, now(), None),
        (OPTIMIZER, now(), None),
        (OPTIMIZER_END, now(), event),
    ]
    return StepRow(number, began, 1, 0.1, trace_of(entries), rare)


def log(number: int, **values: Any) -> tuple[Any, ...]:
    return number, 5.0, 6.0, values


def rows_of(taken: list[Packed]) -> list[tuple[int, dict[str, float]]]:
    """Step and values, by their names."""
    return [(row[0], dict(row[3])) for block in taken for row in rows_in(block)]


def count(taken: list[Packed]) -> int:
    return sum(block.rows for block in taken)


# ---- what users and samplers log


@pytest.mark.parametrize("value", [1.0, 2**70])
def test_logged_row_has_the_time_of_its_call(sender: Any, collector: Collector, value: Any) -> None:
    """The call reads the monotonic clock alone; rows may wait for minutes behind one that is still on the device."""
    sender.rows.append((1, 0.0, time.monotonic() - 100.0, {"x": 1.0, "y": value}))
    taken = collector.collect(0.0, last=False)
    ((_, wall, *_),) = rows_in(taken[0])
    assert wall == pytest.approx(time.time() - 100.0, abs=5.0)


# ---- what waits


def test_log_that_waits_for_its_device_holds_up_later_logs_only(sender: Any, collector: Collector) -> None:
    event = Event()
    later = LoggedLater(1, 5.0, 6.0, {"x": Reading(torch.tensor([1.0]), event, [])})
    host = (2, 5.0, 6.0, ("host/cpu_pct",), (50.0,))
    lost = LoggedLater(1, 5.0, 6.0, {"y": Reading(torch.tensor([1.0]), Event(lost=True), [])})
    sender.rows.extend([step(1), lost, later, step(2), host, (2, 5.0, 6.5, {"x": 2.0})])
    taken = collector.collect(1.0, last=False)
    assert [number for number, values in rows_of(taken) if "loss" in values] == [1, 2]
    assert (2, {"host/cpu_pct": 50.0}) in rows_of(taken)
    assert (count(taken), sender.counters["dropped"], collector.waits) == (3, 1, True)
    event.over = True
    taken = collector.collect(2.0, last=False)
    assert (rows_of(taken), count(taken)) == ([(1, {"x": 1.0}), (2, {"x": 2.0})], 2)
    assert not collector.waits
    assert sender.logged == [2, 2, 0, 0]


def test_steps_that_wait_for_their_device_keep_their_order(sender: Any, collector: Collector) -> None:
    """And hold up no other row, where one rank saves for minutes, or a collective hangs."""
    sender.progress.clock = SimpleNamespace(seconds=lambda begin, end: 0.0, release=lambda events: None)
    first, second = Event(), Event()
    second.over = True
    sender.rows.extend([step(1, event=first), log(1, x=1.0), step(2, event=second)])
    assert rows_of(collector.collect(1.0, last=False)) == [(1, {"x": 1.0})]
    sender.rows.append((2, 5.0, 7.0, ("host/cpu_pct",), (50.0,)))
    assert rows_of(collector.collect(600.0, last=False)) == [(2, {"host/cpu_pct": 50.0})]
    first.over = True
    found = rows_of(collector.collect(601.0, last=False))
    assert [number for number, values in found if {"step_time_s", "loss"} & {*values}] == [1, 2]
    assert not sender.counters["dropped"]


def test_evaluation_after_a_step_that_waits_is_read_after_it(sender: Any, collector: Collector) -> None:
    sender.progress.clock = SimpleNamespace(seconds=lambda begin, end: 0.0, release=lambda events: None)
    sender.reader.evaluations = SimpleNamespace(after=lambda p, step, trace: 2.0)
    event = Event()
    sender.rows.extend([step(1, event=event), AfterLastStep(1, now(), 0, None, [], None)])
    assert rows_of(collector.collect(1.0, last=False)) == []
    event.over = True
    found = [values for _, values in rows_of(collector.collect(2.0, last=False))]
    assert ("loss" in found[0], found[1:]) == (True, [{"phase/eval_s": 2.0}])


def test_log_without_its_step_waits_and_is_counted_at_the_end(sender: Any, collector: Collector) -> None:
    """Rows behind it are taken."""
    settled, waits, comes_last = (EarlyLog(5.0, 6.0, {"x": 1.0}) for _ in range(3))
    sender.rows.extend([settled, waits, log(7, x=2.0)])
    assert rows_of(collector.collect(0.0, last=False)) == [(7, {"x": 2.0})]
    assert collector.aside == [settled, waits]
    settled.step = 3
    sender.rows.append(comes_last)
    assert rows_of(collector.collect(0.1, last=True)) == [(3, {"x": 1.0})]
    assert (sender.counters["dropped"], sender.counters["overflows"], collector.aside) == (2, 0, [])


# ---- steps


def clipped(*norms: float) -> OccasionalValues:
    return OccasionalValues(OptimizerGradients(None, norms), {}, None, None, 0, [], clipped_scaled=False)


def losses(taken: list[Packed]) -> list[tuple[int, float]]:
    return sorted((number, values["loss"]) for number, values in rows_of(taken) if "loss" in values)


def test_steps_of_every_kind_are_taken_once(sender: Any, collector: Collector) -> None:
    steps = [step(1), step(2), step(3, size=7), step(4, loss=2.0, rare=clipped())]
    steps += [step(5, rare=clipped(2.0)), step(6)]
    sender.rows.extend(steps)
    taken = collector.collect(1.0, last=False)
    assert losses(taken) == [(n, 2.0 if n == 4 else 0.5) for n in range(1, 7)]
    (norms,) = [
        (n, values["grad/norm"], values["grad/nonfinite"]) for n, values in rows_of(taken) if "grad/norm" in values
    ]
    assert norms == (5, 2.0, 0.0)


@pytest.mark.parametrize(
    ("row", "presses"),
    [
        (step(1, loss=math.nan, rare=clipped()), True), (step(1, loss=-math.inf, rare=clipped()), True),
        (step(1, rare=clipped(math.inf)), True), (log(1, loss=math.nan, x=1), True), (log(1, **{"train/loss": math.inf}), True),
        (log(1, **{"grad/nonfinite": 1.0}), True), (step(1), False), (step(1, rare=clipped(2.0)), False),
        (log(1, accuracy=math.nan), False), (log(1, **{"val/loss": math.inf}), False), (log(-1, loss=0.5), False),
    ],
)  # fmt: skip
def test_only_a_bad_loss_or_gradient_does_not_wait(sender: Any, collector: Collector, row: Any, presses: bool) -> None:
    sender.rows.append(row)
    collector.collect(1.0, last=False)
    assert collector.pressing is presses


def test_damaged_step_costs_itself_and_is_counted(sender: Any, collector: Collector) -> None:
    sender.rows.extend([step(1), step(2)._replace(trace=[1, 2, 99]), step(3)])
    assert losses(collector.collect(1.0, last=False)) == [(1, 0.5), (3, 0.5)]
    assert sender.counters["dropped"] == 1


def test_loss_that_the_user_logs_goes_with_its_step(sender: Any, collector: Collector) -> None:
    """Now and then; those of steps that never came are forgotten."""
    given = sender.progress.losses.user_losses
    given.update(dict.fromkeys(range(8, 13), 0.5))
    sender.rows.extend(step(number) for number in range(1, 21))
    assert [n for n, _ in losses(collector.collect(1.0, last=False))] == [*range(1, 8), *range(13, 21)]
    sender.progress.completed = 1001
    given.update(dict.fromkeys(range(1, 1003), 0.5))
    sender.rows.append(step(1000))
    assert losses(collector.collect(1.0, last=False)) == []
    assert [*given] == [1001, 1002]


# ---- rows that came too fast


@pytest.fixture
def bounded(sender: Any) -> Any:
    sender.rows = deque(maxlen=1000)
    new_progress(sender.rows)
    return sender


@pytest.mark.parametrize("burst", [0, 1, 998, 999, 1000, 1001, 2500])
@pytest.mark.parametrize("before", [0, 10, 5000])
def test_every_row_that_a_burst_drops_is_counted(bounded: Any, burst: int, before: int) -> None:
    """before: what a script has logged when the sender's thread begins."""
    for number in range(before):
        bounded.rows.append(log(number, a=1.0))
    collector = Collector(bounded, Columns())
    taken = count(collector.collect(1.0, last=False))
    for handed in (burst, 3, burst):
        for number in range(handed):
            bounded.rows.append(log(number, a=1.0))
        taken += count(collector.collect(1.0, last=False))
    while collector.waits:
        taken += count(collector.collect(1.0, last=False))
    assert taken + bounded.counters["overflows"] == before + 2 * burst + 3
    assert bool(bounded.counters["overflows"]) is (burst >= 1000 or before > 1000) or burst == 999


def test_fast_loop_loses_no_row_to_the_pauses_it_is_given(sender: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pause lets a training thread that computes in Python go on for 5 ms: 200 rows at 40 000 a second. More of them
    came during the pauses than were taken between them, and of 197 000 rows 118 000 were dropped."""
    rows = sender.rows = deque(maxlen=5000)
    collector = Collector(sender, Columns())
    given = 0

    def train(count: int) -> None:
        nonlocal given
        for _ in range(count):
            rows.append((given, 1.0, float(given), {"a": 1.0}))
            given += 1

    monkeypatch.setattr(time, "sleep", lambda _: train(200))
    taken = 0
    for _ in range(10):
        train(3000)
        taken += count(collector.collect(1.0, last=False))
    monkeypatch.undo()
    taken += count(collector.collect(1.0, last=True))
    assert not sender.counters["overflows"]
    assert taken == given > 30_000, "it gave way now and then"
