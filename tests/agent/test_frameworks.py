"""torch.compile round any part of a step."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from agent_recorded import Recording
from builders import job_environment
from case_selection import everyday
from preloaded import run

COMPILED = """
    import sys, torch, perfagent
    from torch._dynamo.testing import CompileCounter

    how, graphs = sys.argv[1], CompileCounter()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    run = perfagent.attach(model)
    net = torch.compile(model, backend=graphs) if how == "model" else model
    if how == "in place":
        model.compile(backend=graphs)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    if how == "whole step":
        step = torch.compile(step, backend=graphs)
    for _ in range(6):
        loss = step(torch.randn(4, 8))
    print(graphs.frame_count, loss.item())
"""


def output(folder: Path, *arguments: str, **environment: str) -> str:
    settings = job_environment(folder, PERFAGENT_RECORD=str(folder / "record"), **environment)
    [done] = run([*arguments], folder, [settings])
    assert done.returncode == 0, done.stderr[-3000:]
    assert "perfagent" not in done.stderr, done.stderr[-3000:]
    return done.stdout


@pytest.mark.real
@pytest.mark.parametrize("how", everyday(1, ["in place", "model", "whole step"]))
def test_compiled_training_has_the_same_graphs_and_all_its_steps(tmp_path, how):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(COMPILED), encoding="utf-8")
    without = output(tmp_path / "without", str(script), how, PERFAGENT_DISABLED="1")
    assert output(tmp_path / "with", str(script), how) == without
    record = Recording(tmp_path / "with" / "record")
    assert [step for step, _ in record.series("loss")] == [1, 2, 3, 4, 5, 6]
    if how != "whole step":  # there the forward pass is inside a graph
        assert [step for step, _ in record.series("phase/forward_s")] == [2, 3, 4, 5, 6]
