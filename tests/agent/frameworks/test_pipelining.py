"""Schedules of torch.distributed.pipelining: the loss of a step is the mean over its micro-batches. (One stage, one
process.)"""

from __future__ import annotations

import pytest
import torch
from process_groups import alone_in_group
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch_versions import since_torch


@since_torch(2, 7, "a schedule does not say whether it divides")
@pytest.mark.parametrize(
    ("kind", "reduction"), [(ScheduleGPipe, "mean"), (Schedule1F1B, "mean"), (ScheduleGPipe, "sum")]
)
def test_the_loss_is_what_the_schedule_minimizes(record, kind, reduction) -> None:
    told, mean = {}, reduction == "mean"
    with alone_in_group():
        torch.manual_seed(0)
        stage = PipelineStage(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)), 0, 1, torch.device("cpu"))
        recorded = record(stage.submod)
        schedule = kind(stage, 2, loss_fn=nn.MSELoss(reduction=reduction), scale_grads=mean)
        optimizer = torch.optim.SGD(stage.submod.parameters(), lr=0.1)
        for step in range(1, 5):
            losses: list[torch.Tensor] = []
            schedule.step(torch.randn(8, 4), target=torch.ones(8, 1), losses=losses)
            optimizer.step()
            optimizer.zero_grad()
            told[step] = sum(loss.item() for loss in losses) / (2 if mean else 1)
        assert dict(recorded.of("loss")) == pytest.approx(told, rel=1e-6)
