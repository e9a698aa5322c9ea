"""What all captured loggers have in common, by TensorBoard's writer: what a call costs the script is nothing but
time."""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import ServerProcess, until
from torch.utils.tensorboard import SummaryWriter
from whole_end import whole_end

import perfagent
from perfagent import device, patching
from perfagent.boundary import guard
from perfagent.device import Reading
from perfagent.frameworks.loggers import LOGGERS
from perfagent.frameworks.loggers.capture import Logs, captured
from perfagent.step.captured_log import CapturedLog
from perfagent.step.state import state

Record = Callable[..., Any]


SENT_S = 1.5
"""After so long a row is on its way to the server unless it is held."""


class Logger:
    """A logger of somebody's."""

    def __init__(self) -> None:
        self.given: list[Any] = []

    def log(self, values: Any, step: Any = None) -> str:
        if step == "wrong":
            raise ValueError("no step")
        self.given.append(dict(values))
        return "done"

    def forward(self, values: Any, other: Logger) -> None:
        other.log({f"train/{name}": value for name, value in values.items()} | {"more": 1.0})


@pytest.fixture
def watched() -> Iterator[type[Logger]]:
    """A logger's class, watched as a library's is."""

    class Watched(Logger): ...

    def of_log(self: Any, values: Any, step: Any = None) -> list[Logs]:
        return [Logs(values, step)]

    def of_forward(self: Any, values: Any, other: Any) -> list[Logs]:
        return [Logs(values)]

    for name, read in (("log", of_log), ("forward", of_forward)):
        setattr(Watched, name, captured(read)(getattr(Logger, name)))
    yield Watched
    guard.reset()


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[SummaryWriter]:
    with SummaryWriter(str(tmp_path / "board")) as made:
        yield made


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


def test_a_library_is_patched_while_a_run_lasts_and_not_imported_for_it(record: Record) -> None:
    original = SummaryWriter.add_scalar
    run = start(record)
    assert SummaryWriter.add_scalar is not original
    assert pickle.loads(pickle.dumps(SummaryWriter.add_scalar)) is SummaryWriter.add_scalar
    run.finish()
    assert SummaryWriter.add_scalar is original
    assert not patching._undo


def test_a_patch_of_the_script_on_top_of_ours_stays(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    run = start(record)
    ours = SummaryWriter.add_scalar
    calls = []

    def theirs(*args: Any) -> Any:
        calls.append(args)
        return ours(*args)

    SummaryWriter.add_scalar = theirs
    try:
        run.finish()
        assert SummaryWriter.add_scalar is theirs
    finally:
        SummaryWriter.add_scalar = ours.__wrapped__


def test_a_call_that_names_no_step_is_of_the_step_in_progress_and_moves_none(record: Record, watched: Any) -> None:
    run = start(record)
    watched().log({"before": 1})
    train(1)
    watched().log({"first": 1})
    watched().log({"far": 1}, step=5000)
    train(1)
    watched().log({"second": 1})
    assert run.run.steps_done == 2
    assert scalars(run) == [(1, {"before": 1}), (1, {"first": 1}), (5000, {"far": 1}), (2, {"second": 1})]


def test_a_step_named_before_the_training_begins_does_not_move_the_runs_step(
    server: ServerProcess, writer: SummaryWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole_end(monkeypatch)
    run = perfagent.attach(server=server.url, name="resumed")
    writer.add_scalar("resumed", 1.0, 10_000)
    until(lambda: server.get("/runs")["runs"], why="the server has no run")
    time.sleep(SENT_S)
    train(4)
    run.finish()
    [shown] = until(
        lambda: [one for one in server.get("/runs")["runs"] if one["state"] == "finished"], why="it did not end"
    )
    assert shown["step"] == 4
    assert [sample["step"] for sample in server.export(shown["run"]) if sample["name"] == "resumed"] == [10_000]


def test_a_step_is_taken_as_it_is_named(record: Record, watched: Any) -> None:
    run = start(record)
    train(1)
    given = {3: 3, np.int64(4): 4, 5.0: 5, -1: 0, 2**60: 1, "seven": 1, None: 1, float("nan"): 1}
    for step in given:
        watched().log({"x": 1}, step)
    watched().log({"x": 1}, torch.tensor(8))
    watched().log({"x": 1}, torch.tensor(8, device="meta"))  # cannot be read without waiting for it
    assert [step for step, _ in scalars(run)] == [*given.values(), 8, 1]


def test_what_is_no_scalar_is_ignored_and_what_is_changed_later_is_what_it_was(
    record: Record, watched: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "_elsewhere", device._elsewhere)  # one on a device is met, and other tests have none
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


def test_what_one_logger_forwards_counts_once_and_what_comes_besides_counts_too(record: Record, watched: Any) -> None:
    run = start(record)
    train(1)
    outer, inner = watched(), watched()
    outer.forward({"loss": 2.0}, inner)
    assert inner.given == [{"train/loss": 2.0, "more": 1.0}]
    assert scalars(run) == [(1, {"loss": 2.0}), (1, {"more": 1.0})]


def test_a_logger_on_another_thread_is_no_inner_one(record: Record, watched: Any) -> None:
    run = start(record)
    train(1)
    other = watched()

    class Outer(watched):  # type: ignore[misc, valid-type]
        def __init__(self) -> None: ...

    def elsewhere(self: Any, values: Any) -> None:
        thread = threading.Thread(target=other.log, args=(values,))
        thread.start()
        thread.join()

    Outer.log = captured(lambda self, values: [Logs(values)])(elsewhere)
    Outer().log({"x": 1.0})
    assert len(scalars(run)) == 2


def test_errors_of_the_library_are_its_own_and_turn_nothing_off(record: Record, watched: Any) -> None:
    run = start(record)
    logger = watched()
    with pytest.raises(ValueError, match="no step"):
        logger.log({"x": 1}, "wrong")
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        logger.log()
    with pytest.raises(TypeError, match="not iterable"):
        logger.log(5, 1)
    assert logger.log({"x": 1.0}, step=1) == "done"
    assert (1, {"x": 1.0}) in scalars(run)


def test_a_version_of_a_library_that_is_not_understood_is_left_alone_and_said_once(
    record: Record, caplog: pytest.LogCaptureFixture
) -> None:
    run = start(record)

    class New(Logger): ...

    New.log = captured(lambda self, renamed: [Logs(renamed)])(Logger.log)  # type: ignore[method-assign]
    for _ in range(3):
        assert New().log({"x": 1.0}, step=3) == "done"
    assert len([one for one in caplog.records if "is turned off, training goes on" in one.message]) == 1
    guard.reset()
    assert scalars(run) == []


def test_a_forked_child_logs_for_itself_only(record: Record, watched: Any) -> None:
    run = start(record)
    logger = watched()
    child = os.fork()
    if not child:
        state.current = None  # as session does in every forked child
        logger.log({"x": 1.0}, step=1)
        os._exit(
            len([row for row in run.sender.rows if type(row) is CapturedLog]) + 100 * (logger.given != [{"x": 1.0}])
        )
    assert os.waitpid(child, 0)[1] == 0
    run.finish()


def test_a_value_on_a_device_is_read_when_it_is_there(
    record: Record, watched: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from perfagent.frameworks.loggers import capture

    class Event:
        over = False

        def query(self) -> bool:
            return self.over

    event = Event()
    monkeypatch.setattr(capture, "take", lambda tensor: Reading(torch.tensor([2.5]), event, []))  # as of a CUDA device
    run = start(record)
    watched().log({"x": torch.ones((), device="meta")}, step=1)
    log = next(row for row in run.sender.rows if type(row) is CapturedLog)
    assert not log.ready()
    event.over = True
    assert log.ready()
    assert log.row()[3] == {"x": 2.5}
    run.run.finish()
    run.sender.rows.clear()


def test_a_compiled_function_that_logs_has_the_graphs_that_it_has_without_us(
    record: Record, watched: Any, nothing_compiled: None
) -> None:
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
        @torch.compiler.disable
        def log(self, values: Any, step: Any = None) -> str:
            return super().log(values, step)

    bare = graphs(Plain())
    run = start(record)

    class Compiled(Plain): ...

    Compiled.log = captured(lambda self, values, step: [Logs(values, step)])(Plain.log)
    patching.not_traced(Compiled.log)
    assert graphs(Compiled()) == bare
    assert scalars(run) == [(1, {"n": 1.0})]


def test_each_library_is_watched_under_the_name_of_its_module() -> None:
    """Both of Lightning's names; a file for each."""
    folder = Path(patching.loggers.__file__).parent
    assert {*LOGGERS.values()} == {path.stem for path in folder.glob("*.py")} - {"__init__", "capture", "settings"}
