from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from builders import RecordingSender

from perfagent.delivery.collecting import DEFERRED_S, Collector
from perfagent.delivery.columns import Columns
from perfagent.delivery.packing import rows_in
from perfagent.governor import Governor
from perfagent.hooks.account import BACKWARD, FORWARD, OPTIMIZER, OPTIMIZER_END, trace_of
from perfagent.hooks.progress import Progress, now
from perfagent.hooks.row import LoggedLater, StepRow


class Waits:
    """A row that is not there yet."""

    def ready(self) -> bool:
        return False


@pytest.fixture
def sender(tmp_path: Path) -> Any:
    made = RecordingSender(tmp_path)
    made.logged, made.stepped, made.counters = (0, 0), (0, 0), Counter()  # type: ignore[attr-defined]
    return made


@pytest.fixture
def collector(sender: Any) -> Collector:
    return Collector(sender, Columns(), lambda: None, lambda _: None)


def step(number: int, loss: float = 0.5) -> StepRow:
    entries = [(FORWARD, now(), None, True, None), (BACKWARD, now(), None, loss, False), (OPTIMIZER, now(), None)]
    return StepRow(number, 0.0, now(), 1, 0.1, None, 0, trace_of([*entries, (OPTIMIZER_END, now(), None)]), None)


def test_rows_come_out_in_their_order_up_to_one_that_waits(sender: Any, collector: Collector) -> None:
    progress = sender.progress = Progress(sender.rows, Governor(0.5))
    progress.completed = 3
    sender.rows.extend([step(1), (1, 5.0, 6.0, {"a": 1.0}), step(2), Waits(), step(3)])
    taken = collector.collect(1.0, last=False)
    assert [note.step for note in taken.rows] == [1, 2]
    assert [rows_in(block) for block in taken.packed] == [[(1, 5.0, 6.0, ("a",), (1.0,))]]
    assert taken.total == 3
    assert len(sender.rows) == 2
    assert sender.stepped == (2, 8)
    assert sender.logged == (1, 1)


def test_a_wait_that_ended_is_not_counted_against_the_next_one(sender: Any, collector: Collector) -> None:
    """The newest step waits a moment for a loss of the user's, and is then taken as one of the usual kind."""
    progress = sender.progress = Progress(sender.rows, Governor(0.5))
    progress.completed = 1
    sender.rows.append(step(1))
    assert collector.collect(100.0, last=False).total == 0
    progress.completed = 2
    sender.rows.append(Waits())
    assert [note.step for note in collector.collect(130.0, last=False).rows] == [1]
    assert collector.collect(101.0 + DEFERRED_S, last=False).total == 0
    assert len(sender.rows) == 1, "the second wait began when the first was over"
    assert not sender.counters["dropped"]
    collector.collect(130.0 + DEFERRED_S, last=False)
    assert sender.counters["dropped"] == 1


def test_losses_of_steps_that_never_came_are_forgotten(sender: Any, collector: Collector) -> None:
    progress = sender.progress = Progress(sender.rows, Governor(0.5))
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
    assert sender.logged == (2, 4)
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
    sender.rows.extend((n, 1.0, 1.0, {"a" if n % 3 else "b": float(n), **({"c": 2.0} if n % 2 else {})}) for n in range(12))
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
