"""One training step that is recorded, after some that are not, and what was counted of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from perfagent.measure.flops.step_recording import FlopCount
from perfagent.probes.flops.op_formulas import Counted
from perfagent.probes.flops.step_flops import StepFlops
from perfagent.step.state import state

__all__ = ["counted_in", "counted_step", "recorded_step", "written_by_inductor"]


def recorded_step(model: Any, loss_of: Callable[[Any], torch.Tensor], *, micro_steps: int = 1) -> FlopCount:
    assert state.current is not None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)

    def step() -> None:
        for _ in range(micro_steps):
            loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    while state.current.probe is not None or state.current.completed < 2:  # something else looks at this step
        step()
    look = FlopCount(state.current)
    assert look.at_boundary()
    step()
    assert not look.at_boundary()
    assert not torch.autograd._profiler_enabled()
    return look


def counted_in(look: FlopCount, model: Any, size: tuple[int, int] = (1, 1)) -> Counted:
    """Nothing, where a step's operations cannot be told. size: samples and tokens of the step."""
    flops = StepFlops(lambda: None)
    flops.running = look
    flops.add(look.step, {}, *size, 1.0)
    flops.take(look, model)
    return flops.known.get(size, Counted())


def counted_step(
    model: Any, loss_of: Callable[[Any], torch.Tensor], size: tuple[int, int] = (1, 1), **options: Any
) -> Counted:
    return counted_in(recorded_step(model, loss_of, **options), model, size)


def written_by_inductor(monkeypatch: pytest.MonkeyPatch, folder: Path, *lines: str) -> None:
    """A module of these lines is all that the compiler has written in this process."""
    from torch._inductor.codecache import PyCodeCache

    (folder / "compiled.py").write_text("\n".join(lines))
    monkeypatch.setattr(PyCodeCache, "modules", [SimpleNamespace(__file__=str(folder / "compiled.py"))])
