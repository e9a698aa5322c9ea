"""Evaluations of models that nobody watches are found by their loaders, and nothing else is."""

from __future__ import annotations

import copy
import time

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from perfagent.hooks.account import BACKWARD, BESIDE, CLEARED, DATA, EVALUATED, FORWARD, OPTIMIZER, PHASE
from perfagent.hooks.evaluation import after_last_step
from perfagent.hooks.unseen import unseen_evaluations

NAP_S = 0.05
DATASET = torch.arange(8.0).reshape(4, 2)


def batches(name: str = "") -> DataLoader:
    def collate(items):
        time.sleep(0.004)
        return torch.stack(items)

    return DataLoader(DATASET, batch_size=2, collate_fn=collate)


def train(model, optimizer):
    for x in batches():
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def evaluate(model):
    model.eval()
    with torch.no_grad():
        for x in batches():
            model(x)
            time.sleep(NAP_S)
    model.train()


def start(record):
    model = nn.Linear(2, 1)
    return record(model), model, torch.optim.SGD(model.parameters(), lr=0.01)


def test_the_evaluation_of_an_average_once_an_epoch_is_told(record):
    recorded, model, optimizer = start(record)
    average = torch.optim.swa_utils.AveragedModel(model)
    took = []
    for _ in range(3):
        train(model, optimizer)
        average.update_parameters(model)
        began = time.perf_counter()
        evaluate(average)
        took.append(time.perf_counter() - began)
    after_last_step(recorded.run._progress)
    series = recorded.of("phase/eval_s")
    assert [number for number, _ in series] == [3, 5, 6]
    for (_, told), truth in zip(series, took, strict=True):
        assert 2 * (NAP_S + 0.004) <= told <= truth
    steps = dict(recorded.steps())
    assert steps[3]["phase/data_s"] + steps[3]["phase/other_s"] < steps[3]["phase/eval_s"], "the evaluation is neither"
    assert steps[3]["samples_per_s"] * steps[3]["step_time_s"] == pytest.approx(2)
    events = [data["begin_step"] for kind, data, _ in recorded.sender.events if kind == "phase" and data["name"] == "eval"]
    assert events[:2] == [2, 4]


def test_it_is_one_besides_that_of_the_model_itself(record):
    recorded, model, optimizer = start(record)
    average = copy.deepcopy(model)
    train(model, optimizer)
    evaluate(model)
    evaluate(average)
    train(model, optimizer)
    ((number, told),) = recorded.of("phase/eval_s")
    assert number == 3
    assert told > 4 * NAP_S


def test_batches_that_are_only_collected_are_data(record):
    recorded, model, optimizer = start(record)
    train(model, optimizer)
    kept = list(batches())
    train(model, optimizer)
    assert len(kept) == 2
    assert recorded.of("phase/eval_s") == []
    assert dict(recorded.steps())[3]["phase/data_s"] >= 3 * 0.004


def test_what_is_read_before_the_first_step_is_no_evaluation(record):
    recorded, model, optimizer = start(record)
    evaluate(copy.deepcopy(model))
    train(model, optimizer)
    assert recorded.of("phase/eval_s") == []


def test_an_epoch_of_one_batch_of_a_loop_that_looks_ahead_is_none(record):
    recorded, model, optimizer = start(record)
    for _ in range(4):
        loader = iter(DataLoader(DATASET, batch_size=4))
        x = next(loader)
        time.sleep(NAP_S)  # on its way to a device
        while x is not None:
            ahead = next(loader, None)
            model(x).square().mean().backward()
            optimizer.step()
            x = ahead
    assert recorded.of("phase/eval_s") == []
    assert [number for number, _ in recorded.of("samples_per_s")] == [2, 3, 4]


def test_an_evaluation_is_found_where_no_loader_feeds_the_training(record):
    recorded, model, optimizer = start(record)
    average = copy.deepcopy(model)
    for epoch in range(4):
        model(DATASET).square().mean().backward()
        optimizer.step()
        if epoch == 1:
            evaluate(average)
    assert [number for number, _ in recorded.of("phase/eval_s")] == [3]


def test_a_pass_over_all_data_that_is_trained_on_is_none(record):
    weight = nn.Parameter(torch.ones(2))
    recorded = record(nn.ParameterList([weight]))
    optimizer = torch.optim.SGD([weight], lr=0.01)
    for _ in range(3):
        loss = torch.zeros(())
        for x in batches():
            loss = loss + (x @ weight).square().mean()
            time.sleep(NAP_S)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert recorded.of("phase/eval_s") == []


# places: what was noted, 10 ns for each fetch and as much for what the loop does with the batch
def entries(*what):
    found, at = [], 0
    for one in what:
        kind, *rest = one if isinstance(one, tuple) else (one,)
        found.append((kind, at, at + 10, *(rest or (None,) * 3)))
        at += 20
    return found


BEGIN, END = (DATA, 0, None), (DATA, 7, None)
BATCH, OTHER = (DATA, 7, (2, None, False)), (DATA, 8, (2, None, False))


@pytest.mark.parametrize("fed", [False, True])
@pytest.mark.parametrize("behind", [[OTHER, FORWARD, BACKWARD], []], ids=["another loader", "the end"])
def test_a_loader_that_is_begun_and_read_to_its_end_is_found(behind, fed):
    assert unseen_evaluations(entries(BEGIN, BATCH, BATCH, END, CLEARED, *behind), fed=fed) == [range(4)]


@pytest.mark.parametrize("call", [FORWARD, BESIDE, EVALUATED])
def test_a_call_next_is_of_the_last_batch_where_loaders_feed_the_training(call):
    trace = entries(BEGIN, BATCH, END, CLEARED, call, BACKWARD, OPTIMIZER)
    assert unseen_evaluations(trace, fed=True) == [], "the loop looks one batch ahead"
    assert unseen_evaluations(trace, fed=False) == [range(3)]


@pytest.mark.parametrize("fed", [False, True])
@pytest.mark.parametrize("behind", [BACKWARD, OPTIMIZER])
def test_what_training_comes_next_to_is_none(behind, fed):
    assert unseen_evaluations(entries(BEGIN, BATCH, END, behind, OTHER, FORWARD), fed=fed) == []
    trace = entries(BEGIN, BATCH, END, BEGIN, BATCH, BATCH, END, behind)
    assert unseen_evaluations(trace, fed=fed) == [], "candidates of a search"


def test_several_are_found_each_by_itself():
    trace = entries(BEGIN, BATCH, END, PHASE, BEGIN, BATCH, BATCH, END, BEGIN, OTHER, FORWARD, BACKWARD)
    assert unseen_evaluations(trace, fed=True) == [range(3), range(4, 8)]


@pytest.mark.parametrize(
    "trace",
    [
        (BEGIN, END, OTHER),
        (BATCH, BATCH, END, BEGIN, OTHER),
        (BEGIN, BATCH, BATCH, BEGIN, OTHER),
        (BEGIN, BATCH, OTHER, END, OTHER),
        (BEGIN, OTHER, BATCH, END, OTHER),
        (BEGIN, BATCH, FORWARD, END, OTHER),
        (BEGIN, PHASE, BATCH, END, OTHER),
        (BEGIN, BATCH, OTHER, BATCH, END, OTHER),
    ],
    ids=["empty", "begun before", "broken off", "two loaders", "another first", "called", "in a phase", "in turn"],
)
def test_all_else_is_none(trace):
    assert unseen_evaluations(entries(*trace), fed=True) == []


def test_a_loop_that_does_little_with_the_batches_collects_them():
    quick = [(DATA, 0, 9, 0, None), (DATA, 10, 99, 7, (2, None, False)), (DATA, 100, 199, 7, None)]
    assert unseen_evaluations(quick, fed=True) == []
    slow = [quick[0], quick[1], (DATA, 112, 211, 7, None)]
    assert unseen_evaluations([*quick[:2], *slow[2:]], fed=True) == []
    assert unseen_evaluations([*quick[:2], (DATA, 130, 199, 7, None)], fed=True) == [range(3)]
