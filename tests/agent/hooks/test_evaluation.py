"""Evaluations are found in plain loops: all of them, and nothing else."""

from __future__ import annotations

import pytest
import torch
from agent.hooks import loops
from torch import nn
from torch.utils.data import DataLoader, Dataset

NAP_S = 0.04
SLACK_S = 0.002
spent: dict[str, float] = {}
pytestmark = pytest.mark.usefixtures("clock")


@pytest.fixture(autouse=True)
def nothing_spent() -> None:
    spent.clear()


def nap(what: str, seconds: float = NAP_S) -> None:
    loops.nap(seconds)
    spent[what] = spent.get(what, 0.0) + seconds


class Batches(Dataset):
    def __init__(self, name: str, length: int) -> None:
        self.name, self.length = name, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        nap(f"{self.name} data", 0.01)
        return torch.ones(4)


class Net(nn.Linear):
    def forward(self, x):
        if not torch.is_grad_enabled() or not self.training:
            nap("eval forward")
        return super().forward(x)


def step(model, optimizer, x):
    loops.step(optimizer, model(x).square())


def start(record):
    model = Net(4, 1)
    return record(model), model, loops.sgd(model)


def evaluate(model, *, no_grad=True, score="score"):
    model.eval()
    with torch.set_grad_enabled(not no_grad):
        for x in DataLoader(Batches("eval", 3), batch_size=1):
            model(x)
            nap(score, 0.01)
    model.train()


by_mode = pytest.mark.parametrize("no_grad", [True, False], ids=["no_grad", "with gradients, as some do"])


def is_one_evaluation(seconds: float) -> bool:
    """What is done behind the last call is no part of it for certain."""
    own = spent["eval forward"] + spent["eval data"] + spent["score"] * 2 / 3
    return own <= seconds <= own + spent["score"] / 3 + SLACK_S


@by_mode
def test_an_evaluation_with_its_loader_is_one_phase(record, no_grad):
    recorded, model, optimizer = start(record)
    for epoch in range(3):
        for x in DataLoader(Batches("train", 2), batch_size=1):
            step(model, optimizer, x)
        if epoch == 1:
            evaluate(model, no_grad=no_grad)
    ((number, seconds),) = recorded.of("phase/eval_s")
    assert (number, recorded.consumed()[5], recorded.phases()) == (5, 1, [("eval", 4)])
    assert is_one_evaluation(seconds)
    values = dict(recorded.steps())[5]
    assert values["phase/data_s"] < spent["eval data"] / 3 + SLACK_S, "the evaluation's loader is no data wait"
    assert values["phase/other_s"] < spent["score"] / 3 + SLACK_S
    assert values["phase/forward_s"] < SLACK_S


@by_mode
def test_an_evaluation_after_the_last_step_is_told_at_the_end(record, no_grad):
    recorded, model, optimizer = start(record)
    for x in DataLoader(Batches("train", 3), batch_size=1):
        step(model, optimizer, x)
    evaluate(model, no_grad=no_grad)
    ((number, seconds),) = recorded.of("phase/eval_s")
    assert (number, recorded.phases()) == (3, [("eval", 3)])
    assert is_one_evaluation(seconds)
    rows = [(number, "lr" in values) for number, values in recorded.rows if "lr" in values or "phase/eval_s" in values]
    assert rows == [(1, True), (2, True), (3, True), (3, False)], "a row of its own, behind that of the step"


def test_what_every_step_does_without_gradients_is_training(record):
    recorded, model, optimizer = start(record)
    for _ in range(6):
        with torch.no_grad():
            model(torch.ones(1, 4))
        step(model, optimizer, torch.ones(1, 4))
    assert recorded.numbers("phase/eval_s") in ([], [2])


def test_an_interruption_in_training_mode_is_an_evaluation(record):
    recorded, model, optimizer = start(record)
    for number in range(1, 13):
        step(model, optimizer, torch.ones(1, 4))
        if number % 4 == 0:
            with torch.no_grad():
                model(torch.ones(1, 4))
    assert recorded.numbers("phase/eval_s") == [5, 9, 12]


def test_training_in_evaluation_mode_is_no_evaluation(record):
    recorded, model, optimizer = start(record)
    model.eval()
    for _ in range(4):
        step(model, optimizer, torch.ones(1, 4))
    assert not recorded.of("phase/eval_s")
    assert recorded.numbers("phase/forward_s") == [2, 3, 4]
