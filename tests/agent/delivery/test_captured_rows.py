"""What other loggers log gets its name on the sender's thread: its own, or `logged/NAME` where the agent has that
series."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import RecordingSender

from perfagent.delivery import captured_rows
from perfagent.delivery.columns import Columns
from perfagent.delivery.drain import Collector
from perfagent.delivery.row_packing import rows_in
from perfagent.device import Reading
from perfagent.governor import Governor
from perfagent.hooks.new_progress import new_progress
from perfagent.step.captured_log import CapturedLog, capture
from perfagent.step.row import Note
from perfagent.step.state import Progress


@pytest.fixture
def sender(tmp_path: Path) -> Any:
    made = RecordingSender(tmp_path)
    made.logged, made.stepped, made.counters = (0, 0, 0, 0), (0, 0), Counter()  # type: ignore[attr-defined]
    made.progress = new_progress(made.rows, Governor(0.5))
    made.reader = made.progress.reader  # type: ignore[attr-defined]
    return made


@pytest.fixture
def collector(sender: Any) -> Collector:
    return Collector(sender, Columns(), lambda: None, lambda _: None)


def written(collector: Collector, *, last: bool = False) -> list[tuple[int, dict[str, float]]]:
    taken = collector.collect(time.monotonic(), last=last)
    packed = [row for block in taken.packed for row in rows_in(block)]
    rows = [row for row in taken.rows if not isinstance(row, Note) and len(row) in (4, 5)]
    found = [
        (row[0], dict(row[3]) if len(row) == 4 else dict(zip(row[3], row[4], strict=True))) for row in packed + rows
    ]
    assert taken.total == len(found)
    return sorted(found, key=str)


def stepped(progress: Progress, *names: str, steps: int = 2) -> None:
    """So many steps were made and read, with these series."""
    progress.completed, progress.last = steps, object()  # type: ignore[assignment]
    progress.reader.delivers(names, steps)


def test_a_name_that_is_none_of_the_agents_is_written_at_once(sender: Any, collector: Collector) -> None:
    stepped(sender.progress, "phase/optimizer_s")
    capture(sender.progress, {"train/loss": 0.5, "acc": 1.0}, 3, None)
    assert written(collector) == [(3, {"train/loss": 0.5, "acc": 1.0})]
    assert not collector.waits


def test_a_name_of_the_catalogue_waits_for_the_first_steps(sender: Any, collector: Collector) -> None:
    sender.progress.seen_backward = True
    capture(sender.progress, {"loss": 0.5, "tokens_per_s": 9.0, "x": 1.0}, 1, None)
    assert written(collector) == [(1, {"x": 1.0})]
    assert written(collector) == []
    assert collector.waits
    stepped(sender.progress, "loss", "lr", steps=1)
    assert written(collector) == [(1, {"logged/loss": 0.5})]
    stepped(sender.progress, "loss", "lr", "step_time_s", steps=1)
    assert written(collector) == [(1, {"tokens_per_s": 9.0})]
    assert not collector.waits


def test_the_end_of_a_run_waits_for_no_step(sender: Any, collector: Collector) -> None:
    sender.progress.seen_backward = True
    capture(sender.progress, {"loss": 0.5}, 1, None)
    assert written(collector, last=True) == [(1, {"loss": 0.5})]


def test_a_process_that_steps_no_optimizer_waits_a_moment_only(
    sender: Any, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture(sender.progress, {"loss": 0.5}, 1, None)
    assert written(collector) == []
    monkeypatch.setattr(captured_rows, "_EARLY_S", 0.0)
    assert written(collector) == [(1, {"loss": 0.5})]


def test_a_loop_that_is_known_to_step_none_does_not_wait(sender: Any, collector: Collector) -> None:
    sender.progress.by_log = True
    capture(sender.progress, {"loss": 0.5}, None, 41)
    assert written(collector) == [(41, {"loss": 0.5})]


def test_a_series_that_begins_late_is_the_agents_in_any_training(sender: Any, collector: Collector) -> None:
    stepped(sender.progress, "loss", "lr")
    capture(sender.progress, {"mfu": 30.0, "grad_norm/0.weight": 1.0, "gpu/power_w": 80.0}, 2, None)
    assert written(collector) == [
        (2, {"logged/mfu": 30.0, "logged/grad_norm/0.weight": 1.0, "logged/gpu/power_w": 80.0})
    ]


def test_what_the_script_logs_by_us_is_ours(sender: Any, collector: Collector) -> None:
    stepped(sender.progress, "lr")
    sender.rows.append((2, 0.0, time.monotonic(), {"acc": 0.5, "loss": 3.0}))
    sender.rows.append((2, 0.0, time.monotonic(), {"odd": torch.tensor(0.5)}))
    capture(sender.progress, {"acc": 0.5, "loss": 3.0, "odd": 0.5}, 2, None)
    assert written(collector) == [
        (2, {"acc": 0.5, "loss": 3.0}), (2, {"logged/acc": 0.5, "logged/loss": 3.0, "logged/odd": 0.5}), (2, {"odd": 0.5}),
    ]  # fmt: skip


def test_a_step_far_ahead_of_the_first_waits_until_the_server_knows_the_runs_own(
    sender: Any, collector: Collector
) -> None:
    capture(sender.progress, {"resumed": 1.0}, 10_000, None)
    assert written(collector) == []
    assert sender.progress.logged_at() == 0, "what the samplers send meanwhile is of no later step"
    stepped(sender.progress, "loss", steps=1)
    assert written(collector) == [], "a loss alone says nothing of whose step it is"
    stepped(sender.progress, "phase/optimizer_s", steps=1)
    assert written(collector) == [(10_000, {"resumed": 1.0})]


def test_a_step_far_ahead_is_the_runs_where_no_optimizer_steps(
    sender: Any, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture(sender.progress, {"accuracy": 1.0}, 10_000, None)
    assert written(collector) == []
    monkeypatch.setattr(captured_rows, "_EARLY_S", 0.0)
    assert written(collector) == [(10_000, {"accuracy": 1.0})]
    assert sender.progress.logged_at() == 10_000


def test_a_value_that_two_loggers_were_given_counts_once(sender: Any, collector: Collector) -> None:
    stepped(sender.progress, "phase/optimizer_s")
    for value in (1.0, 1.0, 2.0, float("nan"), float("nan")):
        capture(sender.progress, {"x": value}, 2, None)
    capture(sender.progress, {"x": 2.0}, 3, None)
    assert [(step, str(values["x"])) for step, values in written(collector)] == [
        (2, "1.0"),
        (2, "2.0"),
        (2, "nan"),
        (3, "2.0"),
    ]


class Event:
    over = False

    def query(self) -> bool:
        return self.over


def test_a_value_on_its_way_from_a_device_holds_up_nobody(sender: Any, collector: Collector) -> None:
    event = Event()
    sender.progress.by_log = True
    capture(sender.progress, {"slow": Reading(torch.tensor([2.0]), event, [])}, 1, None)
    capture(sender.progress, {"x": 1.0}, 1, None)
    sender.rows.append((1, 0.0, time.monotonic(), {"mine": 3.0}))
    assert written(collector) == [(1, {"mine": 3.0}), (1, {"x": 1.0})]
    event.over = True
    assert written(collector) == [(1, {"slow": 2.0})]


def test_a_value_of_a_device_that_was_lost_is_counted(sender: Any, collector: Collector) -> None:
    capture(sender.progress, {"slow": Reading(torch.tensor([2.0]), Event(), [])}, 1, None)
    assert written(collector, last=True) == []
    assert sender.counters["dropped"] == 1


def test_a_log_before_any_step_is_on_the_disk_like_one_of_ours(
    sender: Any, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of log(): with what waits for its step (pending_log_file.py)."""
    capture(sender.progress, {"x": 1.0}, None, 7)
    assert written(collector) == []
    [log] = collector.aside
    assert type(log) is CapturedLog
    sender.progress.settle_early(None)
    monkeypatch.setattr(captured_rows, "_EARLY_S", 0.0)
    assert written(collector) == [(7, {"x": 1.0})]
    assert sender.progress.logged_at() == 7


def test_names_and_values_that_cannot_be_stored_are_left_out_without_a_word(sender: Any, collector: Collector) -> None:
    stepped(sender.progress, "phase/optimizer_s")
    capture(sender.progress, {"": 1.0, "x": 2**2000, "text": "no", 3: 4.0}, 1, None)
    assert written(collector) == [(1, {"3": 4.0, "x": float("inf")})]
    assert sender.counters == {}
