"""What all captured loggers have in common, by TensorBoard's writer: what a call costs the script is nothing but
time."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from fake_accelerator import Control
from torch.utils.tensorboard import SummaryWriter

from perfagent import patching
from perfagent.boundary import guard
from perfagent.integrations.loggers.capture import Logs, captured
from perfagent.step.pending_logs import CapturedLog

Record = Callable[..., Any]


class Logger:
    """A logger of somebody's."""

    def __init__(self) -> None:
        self.given: list[Any] = []

    def log(self, values: Any, step: Any = None) -> str:
        if step == "wrong":
            raise ValueError("no step")
        self.given.append(dict(values))
        return "done"


@pytest.fixture
def watched() -> Iterator[type[Logger]]:
    """A logger's class, watched as a library's is."""

    class Watched(Logger):
        log = captured(lambda self, values, step=None: [Logs(values, step)])(Logger.log)

    yield Watched
    guard.reset()


def start(record: Record) -> Any:
    run = record()
    run.run.capture_logs(True)
    return run


def scalars(run: Any) -> list[tuple[int, dict[str, Any]]]:
    """The rows that other loggers have made; ends the run."""
    rows = [row for row in run.sender.rows if type(row) is CapturedLog]
    run.run.finish()
    return [(row[0], dict(row[3])) for row in (log.row() for log in rows)]


def train(steps: int) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()


def test_a_library_is_patched_while_a_run_lasts(record: Record) -> None:
    original = SummaryWriter.add_scalar
    run = start(record)
    assert SummaryWriter.add_scalar is not original
    assert pickle.loads(pickle.dumps(SummaryWriter.add_scalar)) is SummaryWriter.add_scalar
    run.finish()
    assert SummaryWriter.add_scalar is original
    assert not patching._undo


def test_a_call_that_names_no_step_is_of_the_step_in_progress(record: Record, watched: Any) -> None:
    run = start(record)
    watched().log({"before": 1})
    watched().log({"resumed": 1}, step=10_000)
    train(1)
    watched().log({"first": 1})
    watched().log({"far": 1}, step=5000)
    train(1)
    watched().log({"second": 1})
    assert run.run.steps_done == 2
    run.run.capture_logs(False)
    watched().log({"no longer wanted": 1})
    resumed, far = (10_000, {"resumed": 1}), (5000, {"far": 1})  # which move no step
    assert scalars(run) == [(1, {"before": 1}), resumed, (1, {"first": 1}), far, (2, {"second": 1})]


def test_a_step_is_taken_as_it_is_named(record: Record, watched: Any) -> None:
    run = start(record)
    train(1)
    given = {3: 3, np.int64(4): 4, 5.0: 5, -1: 0, 2**60: 1, "seven": 1, None: 1, float("nan"): 1}
    for step in given:
        watched().log({"x": 1}, step)
    watched().log({"x": 1}, torch.tensor(8))
    watched().log({"x": 1}, torch.tensor(8, device="meta"))  # cannot be read without waiting for it
    assert [step for step, _ in scalars(run)] == [*given.values(), 8, 1]


def test_what_is_no_scalar_is_ignored_and_later_changes_too(record: Record, watched: Any) -> None:
    run = start(record)
    tensor, array = torch.ones(1), np.ones(())
    values = {
        "float": 1.5, "int": 2, "bool": True, "numpy": np.float32(0.5), "array": array, "tensor": tensor,
        "half": torch.ones(()).half(),
        "text": "1.0", "none": None, "list": [1.0], "complex": 1j, "many": np.ones(3), "tensors": torch.ones(2), "dict": {"a": 1},
        "object": object(), "meta": torch.ones((), device="meta"),
    }  # fmt: skip
    watched().log(values, step=1)
    tensor += 1
    array += 1
    [(_, found)] = scalars(run)
    found.pop("meta")  # cannot be read: nothing is written of it
    assert found == {"float": 1.5, "int": 2, "bool": True, "numpy": 0.5, "array": 1.0, "tensor": 1.0, "half": 1.0}
    assert run.sender.counters == {}


def test_errors_of_the_library_are_its_own_and_turn_nothing_off(record: Record, watched: Any) -> None:
    run = start(record)
    logger = watched()
    for error, arguments in ((ValueError, ({"x": 1}, "wrong")), (TypeError, ()), (TypeError, (5, 1))):
        with pytest.raises(error, match=r"no step|missing 1 required positional argument|not iterable"):
            logger.log(*arguments)
    assert logger.log({"x": 1.0}, step=1) == "done"
    assert (1, {"x": 1.0}) in scalars(run)


def test_a_version_that_is_not_understood_is_left_alone(record: Record, caplog: pytest.LogCaptureFixture) -> None:
    run = start(record)

    class New(Logger):
        log = captured(lambda self, renamed: [Logs(renamed)])(Logger.log)  # type: ignore[assignment]

    for _ in range(3):
        assert New().log({"x": 1.0}, step=3) == "done"
    assert len([one for one in caplog.records if "is turned off, training goes on" in one.message]) == 1
    guard.reset()
    assert scalars(run) == []


def test_a_value_on_a_device_is_read_when_it_is_there(fakegpu: Control, record: Record, watched: Any) -> None:
    run, value = start(record), torch.full((), 2.5, device="fakegpu:0")
    with fakegpu.held():
        watched().log({"x": value}, step=1)
        log = next(row for row in run.sender.rows if type(row) is CapturedLog)
        assert not log.ready()
    assert log.ready()
    assert scalars(run) == [(1, {"x": 2.5})]


def test_a_compiled_function_that_logs_keeps_its_graphs(record: Record, watched: Any, nothing_compiled: None) -> None:
    from torch._dynamo.testing import CompileCounter

    def graphs(logger: Logger) -> int:
        torch.compiler.reset()
        counter = CompileCounter()

        def step(x: torch.Tensor) -> torch.Tensor:
            y = x * 2
            logger.log({"n": 1.0}, 1)
            return y + 1

        torch.compile(step, backend=counter)(torch.ones(2))
        return counter.frame_count

    class Plain(Logger):
        log = torch.compiler.disable(Logger.log)

    class Compiled(Logger):
        log = captured(lambda self, values, step: [Logs(values, step)])(Plain.log)

    patching.not_traced(Compiled.log)
    bare = graphs(Plain())
    run = start(record)
    assert graphs(Compiled()) == bare
    assert scalars(run) == [(1, {"n": 1.0})]
