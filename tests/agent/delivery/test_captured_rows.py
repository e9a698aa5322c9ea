"""What other loggers log gets its name on the sender's thread: its own, or `logged/NAME` where the agent has that
series."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from perfagent.delivery.captured_rows import EARLY_S
from perfagent.delivery.drain import Collector
from perfagent.delivery.row_packing import rows_in
from perfagent.step.state import StepState

Written = list[tuple[int, dict[str, float]]]


@pytest.fixture
def progress(sender: Any) -> StepState:
    """Of a process that has made no step yet."""
    sender.progress.completed = 0
    return sender.progress  # type: ignore[no-any-return]


def written(collector: Collector, *, last: bool = False) -> Written:
    taken = collector.collect(time.monotonic(), last=last)
    return sorted(((row[0], dict(row[3])) for block in taken for row in rows_in(block) if row[0]), key=str)


def stepped(sender: Any, *names: str, steps: int = 2) -> None:
    """So many steps were made and are read, with these series, under step 0."""
    sender.progress.completed, sender.progress.last = steps, object()  # type: ignore[assignment]
    sender.reader.steps += steps
    sender.rows.append((0, 1.0, 1.0, names, (0.5,) * len(names)))


def later(monkeypatch: pytest.MonkeyPatch) -> None:
    """So much time goes by that no optimizer is expected any more."""
    monotonic = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + EARLY_S)


def steps(*names: str, steps: int = 2) -> Callable[[Any], None]:
    return lambda sender: stepped(sender, *names, steps=steps)


def backward(sender: Any) -> None:
    sender.progress.losses.seen_backward = True


def by_log(sender: Any) -> None:
    sender.progress.logs.by_log = True


LATE = {"mfu": 30.0, "grad_norm/0.weight": 1.0, "gpu/power_w": 80.0}
CASES: dict[str, list[Any]] = {
    # name: what happens by turns, and what is written then. A dict: logged at step 1 (10 000 where it is far ahead).
    "none of the agent's": [steps("phase/optimizer_s"), {"train/loss": 0.5, "x": 1.0}, [(1, {"train/loss": 0.5, "x": 1.0})]],
    "names of the catalogue wait for the first steps": [
        backward, {"loss": 0.5, "tokens_per_s": 9.0, "x": 1.0}, [(1, {"x": 1.0})], "waits",
        steps("loss", "lr", steps=1), [(1, {"logged/loss": 0.5})],
        steps("loss", "lr", "step_time_s", steps=1), [(1, {"tokens_per_s": 9.0})],
    ],
    "no optimizer for a while": [{"loss": 0.5}, "waits", "later", [(1, {"loss": 0.5})]],
    "a loop that is known to step none": [by_log, {"loss": 0.5}, [(1, {"loss": 0.5})]],
    "the end": [backward, {"loss": 0.5}, "end", [(1, {"loss": 0.5})]],
    "series that begin late": [steps("loss", "lr"), LATE, [(1, {f"logged/{name}": value for name, value in LATE.items()})]],
    # the server would take the logger's step for the run's; a loss alone says nothing of whose step it is
    "far ahead, until the server knows the run's own": [
        {"x": 1.0}, "waits", steps("loss", steps=1), "waits", steps("phase/optimizer_s", steps=1), [(10_000, {"x": 1.0})],
    ],
    "far ahead, where no optimizer steps": [{"x": 1.0}, "waits", "later", [(10_000, {"x": 1.0})]],
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_when_and_under_which_name_it_is_written(sender, progress, collector, monkeypatch, case) -> None:
    step = 10_000 if "far ahead" in case else 1
    last = False
    for what in CASES[case]:
        if isinstance(what, dict):
            progress.log_captured(what, step, None)
        elif isinstance(what, list):
            assert written(collector, last=last) == what
        elif what == "waits":
            assert written(collector) == []
            assert collector.waits
            assert progress.logged_at() < 2, "what the samplers send meanwhile is of no later step"
        elif what == "later":
            later(monkeypatch)
        elif callable(what):
            what(sender)
        last |= what == "end"
    assert not collector.waits
    assert progress.logged_at() == 10_000 or case != "far ahead, where no optimizer steps"


def test_what_the_script_logs_by_us_is_ours(sender: Any, progress: StepState, collector: Collector) -> None:
    stepped(sender, "lr")
    sender.rows.append((2, 0.0, time.monotonic(), {"acc": 0.5, "loss": 3.0}))
    sender.rows.append((2, 0.0, time.monotonic(), {"odd": torch.tensor(0.5)}))
    progress.log_captured({"acc": 0.5, "loss": 3.0, "odd": 0.5}, 2, None)
    assert written(collector) == [
        (2, {"acc": 0.5, "loss": 3.0}), (2, {"logged/acc": 0.5, "logged/loss": 3.0, "logged/odd": 0.5}), (2, {"odd": 0.5}),
    ]  # fmt: skip


def test_value_that_two_loggers_were_given_counts_once(sender: Any, progress: StepState, collector: Collector) -> None:
    stepped(sender, "phase/optimizer_s")
    for step, value in ((2, 1.0), (2, 1.0), (2, 2.0), (2, float("nan")), (2, float("nan")), (3, 2.0)):
        progress.log_captured({"x": value}, step, None)
    found = [(step, str(values["x"])) for step, values in written(collector)]
    assert found == [(2, "1.0"), (2, "2.0"), (2, "nan"), (3, "2.0")]
