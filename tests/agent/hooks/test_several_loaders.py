"""Loops that take batches from several loaders before each backward pass: a step's samples are those of all of them."""

from __future__ import annotations

import itertools

import pytest
import torch
from agent.hooks.loops import one_ahead, sgd, step
from torch import nn
from torch.utils.data import DataLoader

STEPS = 5
FEW, MANY, EVALUATED = 4, 12, 10


def rows(count: int) -> list[torch.Tensor]:
    return [torch.ones(3)] * count


class Job:
    """A loop with labeled samples and three times as many unlabeled ones."""

    def __init__(self, record):
        self.model = nn.Linear(3, 1)
        self.optimizer = sgd(self.model, lr=0.01)
        self.recorded = record(self.model, optimizer=self.optimizer)
        self.few, self.many = DataLoader(rows(8), FEW), DataLoader(rows(MANY * STEPS), MANY)
        self.more, self.evaluation = DataLoader(rows(3 * FEW * STEPS), FEW), DataLoader(rows(4 * EVALUATED), EVALUATED)

    def step(self, *batches):
        step(self.optimizer, *map(self.model, batches))

    def evaluate(self, *, graded=False, breaks=False, training=False):
        self.model.train(training)
        with torch.set_grad_enabled(graded):
            for batch in itertools.islice(self.evaluation, 2 if breaks else None):
                self.model(batch)
        self.model.train()

    def samples(self) -> list[int]:
        """Of each step but the first, which has no beginning."""
        return [*self.recorded.consumed().values()]


def two_at_once(job):
    few = itertools.chain.from_iterable(itertools.repeat(job.few))
    for labeled, unlabeled in zip(few, job.many, strict=False):
        job.step(labeled, unlabeled)


def one_that_begins_anew_in_every_step(job):
    for unlabeled in job.many:
        job.step(next(iter(job.few)), unlabeled)


def fetched_ahead(job):
    for batches in one_ahead(zip(job.more, job.many, strict=False)):
        job.step(*batches)


def each_with_a_backward_pass(job):
    for labeled, unlabeled in zip(job.more, job.many, strict=False):
        job.model(labeled).mean().backward()
        job.step(unlabeled)


@pytest.mark.parametrize(
    "loop", [two_at_once, one_that_begins_anew_in_every_step, fetched_ahead, each_with_a_backward_pass]
)
def test_batches_of_two_loaders_are_those_of_a_step(record, loop):
    job = Job(record)
    loop(job)
    assert job.samples() == [FEW + MANY] * (STEPS - 1)


@pytest.mark.parametrize("how", [{}, {"graded": True}, {"breaks": True}, {"breaks": True, "training": True}], ids=str)
def test_an_evaluation_after_each_step_adds_no_samples(record, how):
    """The batch at which one breaks off was fetched for nothing."""
    job = Job(record)
    for unlabeled in job.many:
        job.step(unlabeled)
        job.evaluate(**how)
    assert job.samples() == [MANY] * (STEPS - 1)
