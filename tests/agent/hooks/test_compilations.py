"""What torch.compile did in a training that really compiles: how often, why again, how long; and that it is the same
without us."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from agent_recorded import Recording
from builders import job_environment
from case_selection import everyday
from preloaded import run
from torch import nn

JOB = Path(__file__).parent / "compiling_job.py"


class Told(NamedTuple):
    without: dict[str, Any]
    attached: dict[str, Any]
    recording: Recording


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Told]:
    known: dict[str, Told] = {}

    def of(case: str) -> Told:
        if case not in known:
            folder = tmp_path_factory.mktemp(case)
            environment = job_environment(folder, PERFAGENT_RECORD=str(folder / "record"))
            said = []
            for arguments in ([case], [case, "--attach"]):
                [done] = run([str(JOB), *arguments], folder, [environment])
                assert done.returncode == 0, done
                said.append(json.loads(done.stdout.splitlines()[-1]))
            known[case] = Told(*said, Recording(folder / "record"))
        return known[case]

    return of


@pytest.mark.parametrize("case", everyday(1, ["lengths", "breaks", "plain", "other_torch"]))
def test_losses_and_graphs_are_those_without_the_agent(told, case):
    one = told(case)
    assert one.attached["losses"] == one.without["losses"]
    assert one.attached.get("counters") == one.without.get("counters")
    assert one.attached["failures"] == {} or case == "other_torch"


def test_nine_lengths_are_told_with_their_reason(told):
    recording = told("lengths").recording
    events = recording.events("compile")
    reasons = [event["reason"] for event in events]
    assert reasons == [
        f"tensor 'tokens' size mismatch at index 1. expected {length}, actual {length + 1}" for length in range(3, 11)
    ]
    assert {event["function"] for event in events} == {"forward"}
    line = next(n for n, text in enumerate(JOB.read_text().splitlines(), 1) if "def forward" in text)
    assert all(event["line"].endswith(f"compiling_job.py:{line}") for event in events)
    assert all(event["seconds"] > 0 for event in events)
    assert [event["limit_reached"] for event in events] == [False] * 7 + [True]
    assert events[-1]["limit"] == 8
    assert recording.series("compile/count")[-1][1] == 8
    assert recording.series("compile/recompiles")[-1][1] == 7
    assert recording.series("compile/graph_breaks")[-1][1] == 0


def test_each_event_is_of_the_step_that_compiled(told):
    events = [event for _, group in told("lengths").recording.frames() for event in group if event.kind == "compile"]
    assert [event.step for event in events if not event.data["limit_reached"]] == list(range(2, 9))


def test_compiling_is_a_phase_and_the_phases_still_add_up(told):
    recording = told("lengths").recording
    compiling, steps = dict(recording.series("phase/compile_s")), dict(recording.series("step_time_s"))
    assert sorted(compiling) == list(range(1, 9)), "one for each length, until the limit is reached"
    phases = [dict(recording.series(name)) for name in recording.names() if name.startswith("phase/")]
    for step, seconds in steps.items():
        assert sum(phase.get(step, 0.0) for phase in phases) == pytest.approx(seconds, rel=1e-5)
        if step in compiling:
            event = next(one for one in recording.events("compile") if one["reason"].endswith(f"actual {step + 2}"))
            assert 0.5 * event["seconds"] < compiling[step] < seconds


def test_graph_breaks_are_counted(told):
    one = told("breaks")
    assert sum(one.without["counters"]["graph_break"].values()) == 1
    assert one.recording.series("compile/graph_breaks")[-1][1] == 1
    assert one.recording.series("compile/count")[-1][1] == 2, "what is before the break, and what is behind it"
    assert one.recording.events("compile") == []


def test_a_training_without_torch_compile_has_none_of_it(told):
    one = told("plain")
    assert not any("compile" in name for name in one.recording.names())
    assert one.recording.events("compile") == []


def test_a_run_does_not_import_what_compiles(tmp_path):
    script = (
        "import sys, torch, perfagent; run = perfagent.attach(torch.nn.Linear(2, 2)); "
        "run.log({'loss': 1.0}); run.finish(); print('torch._dynamo' in sys.modules)"
    )
    environment = job_environment(tmp_path, PERFAGENT_RECORD=str(tmp_path / "record"))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.long
def test_a_torch_that_keeps_other_records_is_counted_and_training_goes_on(told):
    one = told("other_torch")
    assert sum(one.attached["failures"].values()) >= 1
    assert all(name.startswith("perfagent.hooks.compilations.") for name in one.attached["failures"])
    assert one.recording.events("compile") == []
    assert one.recording.series("step_time_s"), "everything else is told"
    assert one.recording.series("phase/compile_s"), "the callbacks are another part of torch"


# ---- in this process


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(4, 4), 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.linear(x) * self.scale).square().mean()


class Mean(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.square().mean()


def train(model: Any, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).backward()
        optimizer.step()


@pytest.mark.usefixtures("nothing_compiled")
def test_an_attribute_that_changes_is_the_reason(record):
    model = Scaled()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    recorded = record(model, optimizer=optimizer)
    compiled = torch.compile(model, backend="eager", dynamic=False)
    for scale in (1, 2, 3):
        model.scale = scale
        train(compiled, optimizer)
    recorded.finish()
    told = [data for kind, data, _ in recorded.sender.events if kind == "compile"]
    assert [one["reason"] for one in told] == ["self.scale == 1", "self.scale == 2"]
    assert not any(one["limit_reached"] for one in told)


@pytest.mark.usefixtures("nothing_compiled")
def test_time_is_told_after_torch_dropped_all_callbacks(record):
    model = Scaled()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    recorded = record(model, optimizer=optimizer)
    train(torch.compile(model, backend="eager"), optimizer)
    torch.compiler.reset()
    for poll in list(recorded.sender.sources):
        if getattr(poll, "__qualname__", "").startswith("Compilations"):
            poll()
    train(torch.compile(model, backend="eager"), optimizer)
    assert [step for step, _ in recorded.of("phase/compile_s")] == [1, 4]


@pytest.mark.usefixtures("nothing_compiled")
def test_compiling_within_an_evaluation_is_part_of_the_evaluation(record):
    model = Scaled()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    recorded = record(model, optimizer=optimizer)
    compiled = torch.compile(model, backend="eager", dynamic=False)
    train(compiled, optimizer)
    model.eval()
    with torch.no_grad():
        for _ in range(6):
            compiled(torch.ones(3, 4))
    model.train()
    train(compiled, optimizer)
    steps = recorded.steps()
    evaluated = dict(steps)[4]
    assert evaluated["phase/eval_s"] > 0
    assert "phase/compile_s" not in evaluated
    assert [step for step, values in steps if "phase/compile_s" in values] == [1]


@pytest.mark.usefixtures("nothing_compiled")
def test_an_evaluation_with_gradients_on_is_one_span_although_it_compiles(record):
    model = Scaled()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    recorded = record(model, optimizer=optimizer)
    compiled = torch.compile(model, backend="eager", dynamic=False)
    train(compiled, optimizer)
    model.eval()
    for rows in (3, 4, 5):
        with torch.no_grad():
            compiled(torch.ones(2, 4))
        compiled(torch.ones(rows, 4))
    model.train()
    train(compiled, optimizer)
    evaluated = dict(recorded.steps())[4]
    assert evaluated["phase/eval_s"] > 0.5 * evaluated["step_time_s"]
    assert "phase/compile_s" not in evaluated


@pytest.mark.usefixtures("nothing_compiled")
def test_what_another_thread_compiles_is_counted_and_part_of_no_step(record):
    model = Scaled()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    recorded = record(model, optimizer=optimizer)
    train(model, optimizer)
    beside = threading.Thread(target=torch.compile(Scaled(), backend="eager"), args=(torch.ones(2, 4),))
    beside.start()
    beside.join()
    train(model, optimizer)
    recorded.finish()
    assert [values["compile/count"] for _, values in recorded.rows if "compile/count" in values] == [1.0]
    assert not any("phase/compile_s" in values for _, values in recorded.rows)


class CompilesInBackward(torch.autograd.Function):
    """Stands for the backward pass on a GPU, where autograd's own thread compiles and the training thread waits."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        beside = threading.Thread(target=torch.compile(Scaled(), backend="eager"), args=(torch.ones(2, 4),))
        beside.start()
        beside.join()
        return gradient


@pytest.mark.usefixtures("nothing_compiled")
def test_what_the_thread_of_autograd_compiles_is_taken_off_the_backward_pass(record):
    torch.compile(Mean(), backend="eager")(torch.ones(2, 4))  # imports what is imported at the first time
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    recorded = record(model, optimizer=optimizer)
    train(nn.Sequential(model, Mean()), optimizer)
    optimizer.zero_grad()
    CompilesInBackward.apply(model(torch.ones(2, 4)).square().mean()).backward()
    optimizer.step()
    values = dict(recorded.steps())[4]
    assert values["phase/compile_s"] > values["phase/backward_s"] > 0
    assert sum(one for name, one in values.items() if name.startswith("phase/")) == pytest.approx(values["step_time_s"])


@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own, as it imports what it needs for optimizers
def test_a_compiled_optimizer_is_no_longer_step_of_the_optimizer(record):
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    recorded = record(model, optimizer=optimizer)
    train(nn.Sequential(model, Mean()), optimizer)
    step = torch.compile(optimizer.step, backend="eager")
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).square().mean().backward()
        step()
    steps = dict(recorded.steps())
    compiling = [step for step, values in steps.items() if "phase/compile_s" in values]
    assert compiling[0] == 4
    for values in list(steps.values())[1:]:
        phases = sum(value for name, value in values.items() if name.startswith("phase/"))
        assert phases == pytest.approx(values["step_time_s"])
    assert steps[4]["phase/optimizer_s"] < steps[4]["phase/compile_s"]


@pytest.mark.usefixtures("nothing_compiled")
def test_nothing_stays_in_torch_when_the_run_has_ended(record):
    model = Scaled()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    recorded = record(model, optimizer=optimizer)
    train(torch.compile(model, backend="eager"), optimizer)
    handler = torch._dynamo.callback.callback_handler
    assert len(handler.start_callbacks) == len(handler.end_callbacks) == 1
    recorded.finish()
    assert handler.start_callbacks == handler.end_callbacks == []


@pytest.mark.usefixtures("nothing_compiled")
def test_what_was_compiled_before_the_run_is_not_told(record):
    model = Scaled()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    compiled = torch.compile(model, backend="eager", dynamic=False)
    train(compiled, optimizer)
    recorded = record(model, optimizer=optimizer)
    train(compiled, optimizer)
    recorded.finish()
    assert not any(name.startswith("compile/") for _, values in recorded.rows for name in values)
