"""Schedules of torch.distributed.pipelining: the loss of a step is the mean over its micro-batches. (One stage, one
process.)"""

from __future__ import annotations

import pytest
import torch
from process_groups import alone_in_group
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from perfagent.decode.step_decoder import StepReader

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


@pytest.mark.parametrize("kind", [ScheduleGPipe, Schedule1F1B])
def test_the_loss_is_the_mean_of_what_the_schedule_divides_by(record, stage, kind) -> None:
    recorded = record(stage.submod)
    told = train(stage, kind(stage, MICRO_BATCHES, loss_fn=nn.functional.mse_loss))
    means = {step + 1: sum(losses) / MICRO_BATCHES for step, losses in enumerate(told)}
    assert dict(recorded.of("loss")) == pytest.approx(means, rel=1e-6)


def test_a_schedule_that_divides_nothing_minimizes_the_sum(record, stage) -> None:
    recorded = record(stage.submod)
    loss_of = nn.MSELoss(reduction="sum")
    told = train(stage, ScheduleGPipe(stage, MICRO_BATCHES, loss_fn=loss_of, scale_grads=False))
    sums = {step + 1: sum(losses) for step, losses in enumerate(told)}
    assert dict(recorded.of("loss")) == pytest.approx(sums, rel=1e-6)


def test_another_process_reads_it_alike() -> None:
    reader, other = StepReader(), StepReader()
    reader.account.divided_later = True
    other.restore(reader.context())
    assert other.account.divided_later
