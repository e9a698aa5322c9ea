"""Trainings on a device: what they compute, what the agent tells of them, and that it never makes them wait."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from agent.device.trainings import (
    MADE_OF_TORCH,
    Train,
    captured,
    checkpointing,
    mixed_precision,
    plain,
    value,
)
from agent_recorded import Recording
from fake_accelerator import Control, Counts

import perfagent

DEVICE = "fakegpu:0"
ALL = (*MADE_OF_TORCH, mixed_precision)


def watched(train: Train, steps: int, folder: Path, device: str = DEVICE) -> list[torch.Tensor]:
    """The losses of a training that is recorded, which goes on to its end."""
    run = perfagent.attach(record=str(folder))
    losses = train(device, steps)
    run.finish()
    return losses


@pytest.mark.parametrize("train", MADE_OF_TORCH, ids=lambda train: train.__name__)
def test_a_training_has_the_losses_of_the_cpu(fakegpu: Control, train: Train) -> None:
    assert value(train(DEVICE, 20)) == value(train("cpu", 20))


@pytest.mark.parametrize("train", ALL, ids=lambda train: train.__name__)
def test_a_training_has_the_same_losses_with_the_agent(fakegpu: Control, tmp_path: Path, train: Train) -> None:
    alone = value(train(DEVICE, 20))
    assert value(watched(train, 20, tmp_path)) == alone
    recorded = [(step, loss.hex()) for step, loss in Recording(tmp_path).series("loss")]
    assert len(recorded) >= 15  # of a scaler's first steps some are skipped
    if train in (plain, checkpointing):
        assert recorded == [(step, loss) for step, loss in enumerate(alone, 1)]


def waiting(fakegpu: Control, train: Train, steps: int) -> Counts:
    """What all threads but the agent's asked of the devices in a training."""
    fakegpu.forget_counts()
    train(DEVICE, steps)
    agents = {thread.native_id for thread in threading.enumerate() if thread.name.startswith("perfagent")}
    return fakegpu.counts(without=agents)


def never_waits(fakegpu: Control, train: Train, steps: int, folder: Path) -> None:
    alone = waiting(fakegpu, train, steps)
    run = perfagent.attach(record=str(folder))
    with_agent = waiting(fakegpu, train, steps)
    run.finish()
    assert (with_agent.scalar_reads, with_agent.synchronizations) == (alone.scalar_reads, alone.synchronizations)
    assert with_agent.waits == alone.waits
    assert with_agent.pinned < steps / 10
    assert len(Recording(folder).series("step_time_s")) >= steps - 1


@pytest.mark.parametrize("train", ALL, ids=lambda train: train.__name__)
def test_the_agent_never_makes_a_training_wait(fakegpu: Control, tmp_path: Path, train: Train) -> None:
    never_waits(fakegpu, train, 300, tmp_path)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_agent_makes_none_of_10000_steps_wait(fakegpu: Control, tmp_path: Path) -> None:
    never_waits(fakegpu, plain, 10_000, tmp_path)


def test_a_captured_training_is_left_alone(fakegpu: Control, tmp_path: Path) -> None:
    losses = value(captured(DEVICE, 20))
    assert losses == sorted(losses, key=float.fromhex, reverse=True)
    alone = waiting(fakegpu, captured, 20)
    run = perfagent.attach(record=str(tmp_path))
    with_agent = waiting(fakegpu, captured, 20)
    again = value(captured(DEVICE, 20))
    run.finish()
    assert again == losses
    assert with_agent.waits == alone.waits


def test_replays_of_a_captured_step_are_steps(fakegpu: Control, record: Any) -> None:
    """Three of warm-up, none for the capture, and 17 replays."""
    recorded = record()
    captured(DEVICE, 20)
    assert [step for step, _ in recorded.steps()] == [*range(1, 21)]
    times = recorded.series("step_time_s")
    assert [*times] == [*range(2, 21)] and min(times.values()) > 0


def test_values_of_a_held_device_come_once_it_is_let_go(fakegpu: Control, record: Any) -> None:
    """A script on a GPU runs ahead of it."""
    recorded = record()
    weight = torch.ones(4, device=DEVICE, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    losses = []
    fakegpu.hold()
    for _ in range(5):
        loss = weight.square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    recorded.tick()
    assert not [step for step, values in recorded.rows if "loss" in values]
    fakegpu.let_go()
    assert [loss.hex() for _, loss in recorded.of("loss")] == value(losses)
