"""Schedules of torch.distributed.pipelining: the loss of a step is the mean over its micro-batches. (One stage, one
process.)"""

from __future__ import annotations

import pytest
import torch
from process_groups import alone_in_group
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch_versions import since_torch

STEPS, MICRO_BATCHES = 4, 2


@pytest.fixture
def stage():
    with alone_in_group():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        yield PipelineStage(model, 0, 1, torch.device("cpu"))


def train(stage, schedule) -> list[list[float]]:
    """The losses of the micro-batches by step."""
    optimizer = torch.optim.SGD(stage.submod.parameters(), lr=0.1)
    told = []
    for _ in range(STEPS):
        losses: list[torch.Tensor] = []
        schedule.step(torch.randn(8, 4), target=torch.ones(8, 1), losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        told.append([loss.item() for loss in losses])
    return told


@since_torch(2, 7, "a schedule does not say whether it divides")
@pytest.mark.parametrize(
    ("kind", "reduction"), [(ScheduleGPipe, "mean"), (Schedule1F1B, "mean"), (ScheduleGPipe, "sum")]
)
def test_the_loss_is_what_the_schedule_minimizes(record, stage, kind, reduction) -> None:
    recorded = record(stage.submod)
    mean = reduction == "mean"
    told = train(stage, kind(stage, MICRO_BATCHES, loss_fn=nn.MSELoss(reduction=reduction), scale_grads=mean))
    losses = {step: sum(losses) / (MICRO_BATCHES if mean else 1) for step, losses in enumerate(told, start=1)}
    assert dict(recorded.of("loss")) == pytest.approx(losses, rel=1e-6)
