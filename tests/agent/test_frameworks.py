"""Code that is not a plain loop: torch.compile round any part of a step, and the Transformers Trainer."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from agent_recorded import Recording
from builders import job_environment
from case_selection import everyday
from preloaded import run

SCRIPTS = Path(__file__).parents[1] / "data" / "scripts"

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
    done: Any
    if arguments[0] == "-m":
        done = subprocess.run(
            [sys.executable, *arguments], env=settings, capture_output=True, text=True, timeout=170, check=False
        )
    else:
        [done] = run([*arguments], folder, [settings])
    assert done.returncode == 0, done.stderr[-3000:]
    assert "perfagent" not in done.stderr, done.stderr[-3000:]
    return str(done.stdout)


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


@pytest.mark.long
def test_the_trainers_losses_norms_and_rates_are_ours(tmp_path):
    pytest.importorskip("transformers")
    printed = output(tmp_path, "-m", "perfagent", "run", str(SCRIPTS / "hf_trainer.py"), str(tmp_path / "out"))
    lines = re.findall(r"^logged (\d+): loss (\S+) norm (\S+) lr (\S+)$", printed, re.MULTILINE)
    logged = [tuple(map(float, line)) for line in lines]
    assert len(logged) == 6
    record = Recording(tmp_path / "record")
    assert record.series("loss") == [(int(step), pytest.approx(loss, rel=1e-6)) for step, loss, _, _ in logged]
    assert record.series("grad/norm") == [(int(step), pytest.approx(norm, rel=1e-6)) for step, _, norm, _ in logged]
    assert record.series("lr") == [(int(step), pytest.approx(rate)) for step, _, _, rate in logged]
