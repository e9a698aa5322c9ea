"""What torch.compile did in a training that really compiles: how often, why again, how long; and that it is the same
without us."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from agent.hooks.loops import sgd, step
from builders import job_environment
from torch import nn
from torch._dynamo import utils
from torch_versions import TORCH

pytestmark = [
    pytest.mark.usefixtures("nothing_compiled"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning"),  # torch's own, as it compiles
]


class Model(nn.Module):
    def __init__(self, *, breaks: bool = False) -> None:
        super().__init__()
        self.embedding, self.linear, self.breaks = nn.Embedding(10, 8), nn.Linear(8, 8), breaks

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        if self.breaks:
            torch._dynamo.graph_break()
        return self.linear(hidden).square().mean()


def trained(start: Callable[..., Any] | None, lengths: Any, *, breaks: bool = False) -> tuple[Any, list[Any]]:
    """A training with sequences of these lengths: its run, and its losses and what torch counted."""
    torch.compiler.reset()
    utils.counters.clear()
    torch.manual_seed(0)
    model = Model(breaks=breaks)
    optimizer = sgd(model)
    recorded = start and start(model, optimizer=optimizer)
    compiled = torch.compile(model, backend="aot_eager", dynamic=False)
    found: list[Any] = []
    for length in lengths:
        loss = compiled(torch.arange(2 * length).reshape(2, length) % 10)
        step(optimizer, loss)
        found.append(loss.item())
    found += [dict(utils.counters[name]) for name in ("stats", "frames", "graph_break", "aot_autograd")]
    if recorded:
        recorded.finish()
    return recorded, found


def compile_events(recorded: Any) -> list[tuple[dict[str, Any], int]]:
    return [(data, number) for kind, data, number in recorded.sender.events if kind == "compile"]


def test_nine_lengths_are_told_with_reason_step_and_place(record):
    lengths = (*range(3, 14), *range(3, 14))
    recorded, found = trained(record, lengths)
    assert found == trained(None, lengths)[1], "losses and graphs are those without us"
    line = next(n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "def forward" in text)
    events = compile_events(recorded)
    for length, (data, number) in enumerate(events, 3):
        which = data["reason"].replace("stride mismatch at index 0", "size mismatch at index 1")  # before torch 2.6
        assert which == f"tensor 'tokens' size mismatch at index 1. expected {length}, actual {length + 1}"
        assert (data["function"], data["line"].endswith(f"{Path(__file__).name}:{line}")) == ("forward", True)
        assert (data["seconds"] > 0, data["limit_reached"], data.get("limit", 8)) == (True, length == 10, 8)
        assert data["limit_reached"] or number == length - 1
    if TORCH < (2, 11):  # which keeps no record of a limit that is reached
        assert len(events) == 7
    else:
        assert (len(events), events[-1][0]["limit"]) == (8, 8)
    for name, last in (("count", 8), ("recompiles", 7), ("graph_breaks", 0)):
        assert recorded.of(f"compile/{name}")[-1][1] == last, name
    compiling = recorded.series("phase/compile_s")
    assert sorted(compiling) == list(range(1, 9)), "one for each length, until the limit is reached"
    for number, values in recorded.steps()[1:]:
        phases = [seconds for name, seconds in values.items() if name.startswith("phase/")]
        assert sum(phases) == pytest.approx(values["step_time_s"], rel=1e-5)
        if number in range(2, 9):
            assert 0.5 * events[number - 2][0]["seconds"] < compiling[number] < values["step_time_s"]


@pytest.mark.real
def test_a_run_does_not_import_what_compiles(tmp_path):
    script = (
        "import sys, torch, perfagent; run = perfagent.attach(torch.nn.Linear(2, 2)); "
        "run.log({'loss': 1.0}); run.finish(); print('torch._dynamo' in sys.modules)"
    )
    environment = job_environment(tmp_path, PERFAGENT_RECORD=str(tmp_path / "record"))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.strip() == "False"


def test_what_was_compiled_before_the_run_is_not_told(record):
    model = Model()
    optimizer, compiled = sgd(model), torch.compile(model, backend="eager", dynamic=False)

    def train(length):
        for _ in range(3):
            step(optimizer, compiled(torch.arange(2 * length).reshape(2, length) % 10))

    train(3)
    recorded = record(model, optimizer=optimizer)
    train(3)
    handler = torch._dynamo.callback.callback_handler
    assert len(handler.start_callbacks) == len(handler.end_callbacks) == 1
    recorded.finish()
    assert not {name for _, values in recorded.rows for name in values if "compile" in name}
    assert handler.start_callbacks == handler.end_callbacks == []
