"""Evaluations of models that nobody watches are found by their loaders, and nothing else is."""

from __future__ import annotations

import copy

import pytest
import torch
from agent.hooks.loops import about, nap, sgd, step
from torch import nn
from torch.utils.data import DataLoader

from perfagent.decode.evaluations import unseen_evaluations
from perfagent.step.trace import (
    BACKWARD,
    BACKWARD_END,
    BESIDE,
    CLEARED,
    DATA,
    EVALUATED,
    FIELDS,
    FORWARD,
    OPTIMIZER,
    PHASE,
)

NAP_S, DATA_S = 0.03, 0.004
DATASET = torch.arange(16.0).reshape(8, 2)


pytestmark = pytest.mark.usefixtures("clock")


def batches() -> DataLoader:
    def collate(items):
        nap(DATA_S)
        return torch.stack(items)

    return DataLoader(DATASET, batch_size=2, collate_fn=collate)


def train(model, optimizer):
    for x in batches():
        step(optimizer, model(x).square())


def evaluate(model):
    model.eval()
    with torch.no_grad():
        for x in batches():
            model(x)
            nap(NAP_S)
    model.train()


def start(record):
    model = nn.Linear(2, 1)
    return record(model), model, sgd(model, lr=0.01)


def test_the_evaluation_of_an_average_once_an_epoch_is_told(record):
    recorded, model, optimizer = start(record)
    average = torch.optim.swa_utils.AveragedModel(model)
    for _ in range(3):
        train(model, optimizer)
        average.update_parameters(model)
        evaluate(average)
    series = recorded.of("phase/eval_s")
    assert [number for number, _ in series] == [5, 9, 12]
    assert all(about(seconds, 4 * (NAP_S + DATA_S)) for _, seconds in series)
    values = dict(recorded.steps())[5]
    assert about(values["phase/data_s"] + values["phase/other_s"], DATA_S), "the evaluation is neither"
    assert recorded.consumed()[5] == 2
    assert recorded.phases()[:2] == [("eval", 4), ("eval", 8)]


# ---- what is none


def collects(model, optimizer):
    train(model, optimizer)
    assert len(list(batches())) == 4
    train(model, optimizer)


def reads_before_the_first_step(model, optimizer):
    evaluate(copy.deepcopy(model))
    train(model, optimizer)


def trains_on_all_data_at_once(model, optimizer):
    for _ in range(3):
        losses = []
        for x in batches():
            losses.append((x @ model.weight.T).square())
            nap(NAP_S)
        step(optimizer, *losses)


@pytest.mark.parametrize("loop", [collects, reads_before_the_first_step, trains_on_all_data_at_once])
def test_a_pass_over_a_loader_that_trains_or_waits_is_none(record, loop):
    recorded, model, optimizer = start(record)
    loop(model, optimizer)
    assert recorded.of("phase/eval_s") == []
    assert loop is not collects or about(recorded.series("phase/data_s")[5], 5 * DATA_S)


# ---- as it was noted


# places: what was noted, 10 ns for each fetch and as much for what the loop does with the batch
def entries(*what):
    found, at = [], 0
    for one in what:
        kind, *rest = one if isinstance(one, tuple) else (one,)
        found.append((kind, at, at + 10, *(rest or (None,) * 3))[: FIELDS[kind]])
        at += 20
    return found


BEGIN, END = (DATA, 0, None), (DATA, 7, None)
BATCH, OTHER = (DATA, 7, (2, None, False)), (DATA, 8, (2, None, False))


@pytest.mark.parametrize("behind", [[OTHER, FORWARD, BACKWARD], []], ids=["another loader", "the end"])
def test_a_loader_that_is_begun_and_read_to_its_end_is_found(behind):
    assert unseen_evaluations(entries(BEGIN, BATCH, BATCH, END, CLEARED, *behind)) == [range(4)]


COMPILES = (PHASE, "compile", None, None)


@pytest.mark.parametrize(
    "trace", [(BEGIN, BATCH, COMPILES, BATCH, COMPILES, END), (BEGIN, COMPILES, BATCH, BATCH, BATCH, END)]
)
def test_a_model_compiled_at_its_first_batch_is_evaluated(trace):
    assert unseen_evaluations(entries(*trace, OTHER, FORWARD, BACKWARD)) == [range(6)]


@pytest.mark.parametrize("call", [FORWARD, BESIDE, EVALUATED])
def test_a_call_next_is_of_a_batch_that_was_kept(call):
    assert unseen_evaluations(entries(BEGIN, BATCH, END, CLEARED, call, BACKWARD, OPTIMIZER)) == []


@pytest.mark.parametrize("behind", [BACKWARD, OPTIMIZER])
def test_what_training_comes_next_to_is_none(behind):
    assert unseen_evaluations(entries(BEGIN, BATCH, END, behind, OTHER, FORWARD)) == []
    trace = entries(BEGIN, BATCH, END, BEGIN, BATCH, BATCH, END, behind)
    assert unseen_evaluations(trace) == [], "candidates of a search"


NONE = {
    "empty": (BEGIN, END, OTHER),
    "begun before": (BATCH, BATCH, END, BEGIN, OTHER),
    "broken off": (BEGIN, BATCH, BATCH, BEGIN, OTHER),
    "two loaders": (BEGIN, BATCH, OTHER, END, OTHER),
    "another first": (BEGIN, OTHER, BATCH, END, OTHER),
    "called": (BEGIN, BATCH, FORWARD, END, OTHER),
    "in a phase": (BEGIN, PHASE, BATCH, END, OTHER),
    "in turn": (BEGIN, BATCH, OTHER, BATCH, END, OTHER),
    "trained on": (CLEARED, BATCH, FORWARD, BACKWARD, BACKWARD_END, BATCH, END, BEGIN, OTHER),
}


@pytest.mark.parametrize("kind", NONE)
def test_all_else_is_none(kind):
    assert unseen_evaluations(entries(*NONE[kind])) == []


def test_a_loop_that_does_little_with_the_batches_collects_them():
    begin, batch = (DATA, 0, 9, 0, None), (DATA, 10, 99, 7, (2, None, False))
    for next_at, found in ((100, []), (112, []), (130, [range(3)])):
        assert unseen_evaluations([begin, batch, (DATA, next_at, 199, 7, None)]) == found, next_at
