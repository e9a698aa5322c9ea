"""Loops that take batches from several loaders before each backward pass: a step's samples are those of all of them."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

STEPS = 5
FEW, MANY, EVALUATED = 4, 12, 10


def forever(loader) -> Iterator[torch.Tensor]:
    while True:
        yield from loader


class Job:
    """A loop with labeled samples and three times as many unlabeled ones."""

    def __init__(self, record):
        self.model = nn.Linear(3, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.recorded = record(self.model, optimizer=self.optimizer)
        self.few, self.many = DataLoader([torch.ones(3)] * 8, FEW), DataLoader([torch.ones(3)] * MANY * STEPS, MANY)
        self.more = DataLoader([torch.ones(3)] * 3 * FEW * STEPS, FEW)

    def step(self, *losses):
        sum(loss.mean() for loss in losses).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def samples(self) -> list[int]:
        """Of each step but the first, which has no beginning."""
        seconds = dict(self.recorded.of("step_time_s"))
        return [round(rate * seconds[step]) for step, rate in self.recorded.of("samples_per_s")]


def test_batches_of_two_loaders_are_those_of_a_step(record):
    job = Job(record)
    for labeled, unlabeled in zip(forever(job.few), job.many, strict=False):
        job.step(job.model(labeled), job.model(unlabeled))
    assert job.samples() == [FEW + MANY] * (STEPS - 1)


def test_of_a_loader_that_begins_anew_in_every_step_too(record):
    job = Job(record)
    for unlabeled in job.many:
        labeled = next(iter(job.few))
        job.step(job.model(labeled), job.model(unlabeled))
    assert job.samples() == [FEW + MANY] * (STEPS - 1)


def test_loaders_that_take_turns_have_steps_of_their_own(record):
    job = Job(record)
    many = iter(job.many)
    for _ in range(2):
        for labeled in job.few:
            job.step(job.model(labeled))
            job.step(job.model(next(many)))
    assert job.samples() == [MANY, *[FEW, MANY] * 3]


@pytest.mark.parametrize("graded", [False, True])
def test_an_evaluation_after_each_step_adds_no_samples(record, graded):
    job = Job(record)
    evaluation = DataLoader([torch.ones(3)] * 2 * EVALUATED, EVALUATED)
    for unlabeled in job.many:
        job.step(job.model(unlabeled))
        job.model.eval()
        with torch.set_grad_enabled(graded):
            for batch in evaluation:
                job.model(batch)
        job.model.train()
    assert job.samples() == [MANY] * (STEPS - 1)


@pytest.mark.parametrize("used", [False, True], ids=["collected", "evaluated"])
def test_nor_does_an_epoch_of_one_batch_that_no_model_is_seen_to_get(record, used):
    """What is known of it so far could also be an epoch of the training, by a loop that looks one batch ahead."""
    job = Job(record)
    unseen = torch.nn.Linear(3, 3)
    evaluation = DataLoader([torch.ones(3)] * EVALUATED, EVALUATED)
    for unlabeled in job.many:
        for batch in evaluation:
            if used:
                time.sleep(0.003)
                unseen.weight @ batch.T
        job.step(job.model(unlabeled))
    assert job.samples() == [MANY] * (STEPS - 1)


def test_nor_does_one_batch_whose_loader_is_gone_when_the_next_one_gets_its_id(record):
    job = Job(record)
    for _ in range(12):
        assert len(list(DataLoader([torch.ones(3)] * EVALUATED, EVALUATED))) == 1
        for labeled in DataLoader([torch.ones(3)] * 3 * FEW, FEW):
            job.step(job.model(labeled))
    assert job.samples() == [FEW] * 35


@pytest.mark.parametrize("several", [False, True], ids=["one loader", "two loaders"])
@pytest.mark.parametrize("mode", [False, True], ids=["in evaluation mode", "in training mode"])
def test_nor_does_one_that_breaks_off(record, mode, several):
    """The batch at which it does was fetched for nothing."""
    job = Job(record)
    evaluation = DataLoader([torch.ones(3)] * 4 * EVALUATED, EVALUATED)
    for batches in zip(job.more, job.many, strict=False) if several else zip(job.many):
        job.step(*map(job.model, batches))
        job.model.train(mode)
        with torch.no_grad():
            for at, batch in enumerate(evaluation):
                if at == 2:
                    break
                job.model(batch)
        job.model.train()
    assert job.samples() == [FEW + MANY if several else MANY] * (STEPS - 1)


def test_an_evaluation_between_a_batch_and_its_step_takes_nothing_from_it(record):
    job = Job(record)
    evaluation = DataLoader([torch.ones(3)] * 4 * EVALUATED, EVALUATED)
    for step, unlabeled in enumerate(job.many):
        job.model.eval()
        with torch.no_grad():
            for at, batch in enumerate(evaluation if step % 2 else ()):
                if at == 2:
                    break
                job.model(batch)
        job.model.train()
        job.step(job.model(unlabeled))
    assert job.samples() == [MANY] * (STEPS - 1)


@pytest.mark.parametrize("when", ["before the model's call", "behind it"])
def test_batches_that_are_fetched_ahead_are_those_of_their_step(record, when):
    job = Job(record)
    batches = zip(job.more, job.many, strict=False)
    here = next(batches)
    while here is not None:
        ahead = next(batches, None) if when == "before the model's call" else None
        losses = [*map(job.model, here)]
        here = ahead if when == "before the model's call" else next(batches, None)
        job.step(*losses)
    assert job.samples() == [FEW + MANY] * (STEPS - 1)


def test_each_may_have_a_backward_pass_of_its_own_after_both_were_fetched(record):
    job = Job(record)
    for labeled, unlabeled in zip(job.more, job.many, strict=False):
        job.model(labeled).mean().backward()
        job.step(job.model(unlabeled))
    assert job.samples() == [FEW + MANY] * (STEPS - 1)


@pytest.mark.parametrize("first", [True, False])
def test_several_batches_of_one_of_them_all_count(record, first):
    job = Job(record)
    few, many = iter(job.more), iter(job.many)
    for _ in range(STEPS):
        batches = [next(many)] if first else []
        batches += [next(few) for _ in range(3)]
        batches += [] if first else [next(many)]
        job.step(*map(job.model, batches))
    assert job.samples() == [3 * FEW + MANY] * (STEPS - 1)


def test_a_sample_to_look_at_now_and_then_is_none_of_the_training_s(record):
    job = Job(record)
    for at, unlabeled in enumerate(job.many):
        if at % 2:
            next(iter(job.few))
        job.step(job.model(unlabeled))
    assert job.samples()[1::2] == [MANY] * (STEPS // 2)
    assert FEW + MANY not in job.samples()
