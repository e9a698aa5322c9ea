"""What other loggers log gets its name on the sender's thread: its own, or `logged/NAME` where the agent has that
series."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from perfagent.delivery.captured_rows import EARLY_S
from perfagent.delivery.drain import Collector
from perfagent.delivery.row_packing import rows_in
from perfagent.device import Reading
from perfagent.step.captured_log import CapturedLog, capture
from perfagent.step.row import Note
from perfagent.step.state import Progress

Written = list[tuple[int, dict[str, float]]]


@pytest.fixture
def progress(sender: Any) -> Progress:
    """Of a process that has made no step yet."""
    sender.progress.completed = 0
    return sender.progress  # type: ignore[no-any-return]


def written(collector: Collector, *, last: bool = False) -> Written:
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


def later(monkeypatch: pytest.MonkeyPatch) -> None:
    """So much time goes by that no optimizer is expected any more."""
    monotonic = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + EARLY_S)


def test_name_that_is_none_of_the_agents_is_written_at_once(progress: Progress, collector: Collector) -> None:
    stepped(progress, "phase/optimizer_s")
    capture(progress, {"train/loss": 0.5, "acc": 1.0}, 3, None)
    assert written(collector) == [(3, {"train/loss": 0.5, "acc": 1.0})]
    assert not collector.waits


def test_name_of_the_catalogue_waits_for_the_first_steps(progress: Progress, collector: Collector) -> None:
    progress.seen_backward = True
    capture(progress, {"loss": 0.5, "tokens_per_s": 9.0, "x": 1.0}, 1, None)
    assert written(collector) == [(1, {"x": 1.0})]
    assert written(collector) == []
    assert collector.waits
    stepped(progress, "loss", "lr", steps=1)
    assert written(collector) == [(1, {"logged/loss": 0.5})]
    stepped(progress, "loss", "lr", "step_time_s", steps=1)
    assert written(collector) == [(1, {"tokens_per_s": 9.0})]
    assert not collector.waits


@pytest.mark.parametrize("case", ["the run ends", "no optimizer for a while", "its loop is known to step none"])
def test_name_of_the_catalogue_is_its_own_where_no_step_comes(progress, collector, monkeypatch, case):
    progress.by_log = case == "its loop is known to step none"
    capture(progress, {"loss": 0.5}, 1, None)
    if case == "no optimizer for a while":
        assert written(collector) == []
        later(monkeypatch)
    assert written(collector, last=case == "the run ends") == [(1, {"loss": 0.5})]


def test_series_that_begins_late_is_the_agents_in_any_training(progress: Progress, collector: Collector) -> None:
    stepped(progress, "loss", "lr")
    values = {"mfu": 30.0, "grad_norm/0.weight": 1.0, "gpu/power_w": 80.0}
    capture(progress, values, 2, None)
    assert written(collector) == [(2, {f"logged/{name}": value for name, value in values.items()})]


def test_what_the_script_logs_by_us_is_ours(sender: Any, progress: Progress, collector: Collector) -> None:
    stepped(progress, "lr")
    sender.rows.append((2, 0.0, time.monotonic(), {"acc": 0.5, "loss": 3.0}))
    sender.rows.append((2, 0.0, time.monotonic(), {"odd": torch.tensor(0.5)}))
    capture(progress, {"acc": 0.5, "loss": 3.0, "odd": 0.5}, 2, None)
    assert written(collector) == [
        (2, {"acc": 0.5, "loss": 3.0}), (2, {"logged/acc": 0.5, "logged/loss": 3.0, "logged/odd": 0.5}), (2, {"odd": 0.5}),
    ]  # fmt: skip


def test_step_far_ahead_waits_until_the_server_knows_the_runs_own(progress: Progress, collector: Collector) -> None:
    capture(progress, {"resumed": 1.0}, 10_000, None)
    assert written(collector) == []
    assert progress.logged_at() == 0, "what the samplers send meanwhile is of no later step"
    stepped(progress, "loss", steps=1)
    assert written(collector) == [], "a loss alone says nothing of whose step it is"
    stepped(progress, "phase/optimizer_s", steps=1)
    assert written(collector) == [(10_000, {"resumed": 1.0})]


def test_step_far_ahead_is_the_runs_where_no_optimizer_steps(progress, collector, monkeypatch):
    capture(progress, {"accuracy": 1.0}, 10_000, None)
    assert written(collector) == []
    later(monkeypatch)
    assert written(collector) == [(10_000, {"accuracy": 1.0})]
    assert progress.logged_at() == 10_000


def test_log_before_any_step_waits_beside_our_own_early_logs(progress, collector, monkeypatch):
    """So it is on the disk (pending_log_file.py)."""
    capture(progress, {"x": 1.0}, None, 7)
    assert written(collector) == []
    [log] = collector.aside
    assert type(log) is CapturedLog
    progress.settle_early(None)
    later(monkeypatch)
    assert written(collector) == [(7, {"x": 1.0})]
    assert progress.logged_at() == 7


def test_value_that_two_loggers_were_given_counts_once(progress: Progress, collector: Collector) -> None:
    stepped(progress, "phase/optimizer_s")
    for step, value in ((2, 1.0), (2, 1.0), (2, 2.0), (2, float("nan")), (2, float("nan")), (3, 2.0)):
        capture(progress, {"x": value}, step, None)
    found = [(step, str(values["x"])) for step, values in written(collector)]
    assert found == [(2, "1.0"), (2, "2.0"), (2, "nan"), (3, "2.0")]


class Event:
    over = False

    def query(self) -> bool:
        return self.over


def test_value_on_its_way_from_a_device_holds_up_nobody(sender: Any, progress: Progress, collector: Collector) -> None:
    event, lost = Event(), Event()
    progress.by_log = True
    capture(progress, {"slow": Reading(torch.tensor([2.0]), event, [])}, 1, None)
    capture(progress, {"x": 1.0}, 1, None)
    capture(progress, {"lost": Reading(torch.tensor([2.0]), lost, [])}, 1, None)
    sender.rows.append((1, 0.0, time.monotonic(), {"mine": 3.0}))
    assert written(collector) == [(1, {"mine": 3.0}), (1, {"x": 1.0})]
    event.over = True
    assert written(collector) == [(1, {"slow": 2.0})]
    assert written(collector, last=True) == []
    assert sender.counters["dropped"] == 1


def test_what_cannot_be_stored_is_left_out_without_a_word(sender, progress, collector):
    stepped(progress, "phase/optimizer_s")
    capture(progress, {"": 1.0, "x": 2**2000, "text": "no", 3: 4.0}, 1, None)
    assert written(collector) == [(1, {"3": 4.0, "x": float("inf")})]
    assert not sender.counters
