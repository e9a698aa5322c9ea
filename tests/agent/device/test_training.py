"""Trainings on a device: what they compute, what the agent tells of them, and that it never makes them wait."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from agent.device.trainings import MADE_OF_TORCH, Train, captured, mixed_precision, plain, value
from agent_recorded import Recording
from fake_accelerator import Control, Counts

import perfagent

DEVICE = "fakegpu:0"
ALL = (*MADE_OF_TORCH, mixed_precision)


def waiting(fakegpu: Control, train: Train, steps: int) -> tuple[list[str], Counts]:
    """The losses, and what all threads but the agent's asked of the devices."""
    fakegpu.forget_counts()
    losses = train(DEVICE, steps)
    agents = {thread.native_id for thread in threading.enumerate() if thread.name.startswith("perfagent")}
    return value(losses), fakegpu.counts(without=agents)


def never_waits(fakegpu: Control, train: Train, steps: int, folder: Path) -> None:
    """The same losses, without waiting more."""
    alone, before = waiting(fakegpu, train, steps)
    run = perfagent.attach(record=str(folder))
    losses, with_agent = waiting(fakegpu, train, steps)
    run.finish()
    assert losses == alone
    assert (with_agent.scalar_reads, with_agent.synchronizations) == (before.scalar_reads, before.synchronizations)
    assert with_agent.waits == before.waits
    assert with_agent.pinned < steps / 10
    recorded = [(step, loss.hex()) for step, loss in Recording(folder).series("loss")]
    assert len(recorded) >= 0.9 * steps  # of a scaler's first steps some are skipped
    if train is plain:
        assert recorded == [*enumerate(alone, 1)][-len(recorded) :]


@pytest.mark.parametrize("train", ALL, ids=lambda train: train.__name__)
def test_the_agent_never_makes_a_training_wait(fakegpu: Control, tmp_path: Path, train: Train) -> None:
    never_waits(fakegpu, train, 300, tmp_path)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_agent_makes_none_of_10000_steps_wait(fakegpu: Control, tmp_path: Path) -> None:
    never_waits(fakegpu, plain, 10_000, tmp_path)


def test_a_captured_training_is_left_alone(fakegpu: Control, tmp_path: Path) -> None:
    losses, alone = waiting(fakegpu, captured, 20)
    assert losses == sorted(losses, key=float.fromhex, reverse=True)
    run = perfagent.attach(record=str(tmp_path))
    again, with_agent = waiting(fakegpu, captured, 20)
    run.finish()
    assert (again, with_agent.waits) == (losses, alone.waits)


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
