"""Evaluations of models that nobody watches are found by their loaders, and nothing else is."""

from __future__ import annotations

import copy

import pytest
import torch
from agent.hooks.loops import about, nap, sgd, step
from torch import nn
from torch.utils.data import DataLoader

from perfagent.decode.evaluations import unseen_evaluations
from perfagent.step import trace as kinds

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
        found.append((kind, at, at + 10, *(rest or (None,) * 3))[: kinds.FIELDS[kind]])
        at += 20
    return found


BEGIN, END = (kinds.DATA, 0, None), (kinds.DATA, 7, None)
BATCH, OTHER = (kinds.DATA, 7, (2, None, False)), (kinds.DATA, 8, (2, None, False))
CALLS = (kinds.FORWARD, kinds.BESIDE, kinds.EVALUATED)


READ, COMPILES = (BEGIN, BATCH, BATCH, END), (kinds.PHASE, "compile", None, None)
FOUND = {
    "then another loader": (*READ, kinds.CLEARED, OTHER, kinds.FORWARD, kinds.BACKWARD),
    "then the end": (*READ, kinds.CLEARED),
    "compiled at its first batch": (BEGIN, BATCH, COMPILES, BATCH, COMPILES, END, OTHER, kinds.FORWARD, kinds.BACKWARD),
}
NONE = {
    "empty": (BEGIN, END, OTHER),
    "begun before": (BATCH, BATCH, END, BEGIN, OTHER),
    "broken off": (BEGIN, BATCH, BATCH, BEGIN, OTHER),
    "two loaders": (BEGIN, BATCH, OTHER, END, OTHER),
    "another first": (BEGIN, OTHER, BATCH, END, OTHER),
    "in turn": (BEGIN, BATCH, OTHER, BATCH, END, OTHER),
    "called": (BEGIN, BATCH, kinds.FORWARD, END, OTHER),
    "in a phase": (BEGIN, kinds.PHASE, BATCH, END, OTHER),
    "candidates of a search": (*READ, *READ, kinds.BACKWARD),
    **{f"then {kind} of a kept batch": (*READ, kinds.CLEARED, kind, kinds.BACKWARD) for kind in CALLS},
    **{f"then {kind}": (*READ, kind, OTHER, kinds.FORWARD) for kind in (kinds.BACKWARD, kinds.OPTIMIZER)},
}


@pytest.mark.parametrize("kind", [*FOUND, *NONE])
def test_a_loader_read_to_its_end_and_not_trained_on_is_found(kind):
    trace = entries(*(FOUND | NONE)[kind])
    assert unseen_evaluations(trace) == [range(6 if "compiled" in kind else 4)] * (kind in FOUND)


def test_a_loop_that_does_little_with_the_batches_collects_them():
    begin, batch = (kinds.DATA, 0, 9, 0, None), (kinds.DATA, 10, 99, 7, (2, None, False))
    for next_at, found in ((100, []), (112, []), (130, [range(3)])):
        assert unseen_evaluations([begin, batch, (kinds.DATA, next_at, 199, 7, None)]) == found, next_at
