"""Evaluations of models that nobody watches are found by their loaders, and nothing else is."""

from __future__ import annotations

import copy
import time

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from perfagent.decode.evaluations import unseen_evaluations
from perfagent.hooks.evaluation import after_last_step
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

NAP_S = 0.03
DATASET = torch.arange(16.0).reshape(8, 2)


def batches(sleep=time.sleep) -> DataLoader:
    def collate(items):
        sleep(0.004)
        return torch.stack(items)

    return DataLoader(DATASET, batch_size=2, collate_fn=collate)


def train(model, optimizer, sleep=time.sleep):
    for x in batches(sleep):
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
    assert [number for number, _ in series] == [5, 9, 12]
    for (_, told), truth in zip(series, took, strict=True):
        assert 4 * (NAP_S + 0.004) <= told <= truth + NAP_S
    steps = dict(recorded.steps())
    assert steps[5]["phase/data_s"] + steps[5]["phase/other_s"] < steps[5]["phase/eval_s"], "the evaluation is neither"
    assert steps[5]["samples_per_s"] * steps[5]["step_time_s"] == pytest.approx(2)
    events = [
        data["begin_step"] for kind, data, _ in recorded.sender.events if kind == "phase" and data["name"] == "eval"
    ]
    assert events[:2] == [4, 8]


def test_it_is_one_besides_that_of_the_model_itself(record):
    recorded, model, optimizer = start(record)
    average = copy.deepcopy(model)
    train(model, optimizer)
    evaluate(model)
    evaluate(average)
    train(model, optimizer)
    ((number, told),) = recorded.of("phase/eval_s")
    assert number == 5
    assert told > 8 * NAP_S


def test_batches_that_are_only_collected_are_data(clock, record):
    recorded, model, optimizer = start(record)
    train(model, optimizer, clock.sleep)
    kept = list(batches(clock.sleep))
    train(model, optimizer, clock.sleep)
    assert len(kept) == 4
    assert recorded.of("phase/eval_s") == []
    assert dict(recorded.steps())[5]["phase/data_s"] >= 5 * 0.004


def test_a_step_of_several_micro_batches_is_told_with_the_evaluation_before_it(record):
    recorded, model, optimizer = start(record)
    for _ in range(2):
        for number, x in enumerate(batches()):
            (model(x).square().mean() / 2).backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
        evaluate(model)
    train(model, optimizer)
    assert [number for number, _ in recorded.steps()] == [*range(1, 9)]
    assert [number for number, _ in recorded.of("phase/eval_s")] == [3, 5]


def test_what_is_read_before_the_first_step_is_no_evaluation(record):
    recorded, model, optimizer = start(record)
    evaluate(copy.deepcopy(model))
    train(model, optimizer)
    assert recorded.of("phase/eval_s") == []


def test_an_epoch_of_one_batch_of_a_loop_that_looks_ahead_is_none(record):
    recorded, model, optimizer = start(record)
    for _ in range(4):
        loader = iter(DataLoader(DATASET, batch_size=8))
        x = next(loader)
        time.sleep(NAP_S)  # on its way to a device
        while x is not None:
            ahead = next(loader, None)
            model(x).square().mean().backward()
            optimizer.step()
            x = ahead
    assert recorded.of("phase/eval_s") == []
    assert [number for number, _ in recorded.of("samples_per_s")] == [2, 3, 4]


def test_batches_that_are_fetched_by_the_chunk_are_data(record):
    recorded, model, optimizer = start(record)
    for _ in range(3):
        chunk = []
        for x in batches():
            time.sleep(0.003)
            chunk.append(x)
        for x in chunk:
            model(x).square().mean().backward()
            optimizer.step()
    assert recorded.of("phase/eval_s") == []


def test_what_each_step_learns_from_first_is_training(record):
    """An episode: the samples that its classes are made of, and those that the loss is of."""
    recorded, model, optimizer = start(record)
    for _ in range(4):
        weight = model.weight.clone()
        for x in batches():
            time.sleep(NAP_S / 5)
            weight = weight - 0.01 * x.mean(0)
        for x in DataLoader(DATASET, batch_size=8):
            (model(x) - x @ weight.T).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert recorded.of("phase/eval_s") == []


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
def test_a_model_that_is_compiled_at_its_first_batch_is_evaluated_all_the_same(trace):
    assert unseen_evaluations(entries(*trace, OTHER, FORWARD, BACKWARD)) == [range(6)]


def test_long_compilations_are_no_wait_for_data():
    trace = [(DATA, 0, 9, 0, None), (DATA, 10, 20, 7, (2, None, False)), (PHASE, 21, 900, "compile", None, None)]
    assert unseen_evaluations([*trace, (DATA, 901, 910, 7, None)]) == [range(4)]


@pytest.mark.parametrize("call", [FORWARD, BESIDE, EVALUATED])
def test_a_call_next_is_of_a_batch_that_was_kept(call):
    assert unseen_evaluations(entries(BEGIN, BATCH, END, CLEARED, call, BACKWARD, OPTIMIZER)) == []


@pytest.mark.parametrize("behind", [BACKWARD, OPTIMIZER])
def test_what_training_comes_next_to_is_none(behind):
    assert unseen_evaluations(entries(BEGIN, BATCH, END, behind, OTHER, FORWARD)) == []
    trace = entries(BEGIN, BATCH, END, BEGIN, BATCH, BATCH, END, behind)
    assert unseen_evaluations(trace) == [], "candidates of a search"


def test_several_are_found_each_by_itself():
    trace = entries(BEGIN, BATCH, END, PHASE, BEGIN, BATCH, BATCH, END, BEGIN, OTHER, FORWARD, BACKWARD)
    assert unseen_evaluations(trace) == [range(3), range(4, 8)]


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
        (CLEARED, BATCH, FORWARD, BACKWARD, BACKWARD_END, BATCH, END, BEGIN, OTHER),
    ],
    ids=[
        "empty",
        "begun before",
        "broken off",
        "two loaders",
        "another first",
        "called",
        "in a phase",
        "in turn",
        "trained on",
    ],
)
def test_all_else_is_none(trace):
    assert unseen_evaluations(entries(*trace)) == []


def test_a_loop_that_does_little_with_the_batches_collects_them():
    quick = [(DATA, 0, 9, 0, None), (DATA, 10, 99, 7, (2, None, False)), (DATA, 100, 199, 7, None)]
    assert unseen_evaluations(quick) == []
    slow = [quick[0], quick[1], (DATA, 112, 211, 7, None)]
    assert unseen_evaluations([*quick[:2], *slow[2:]]) == []
    assert unseen_evaluations([*quick[:2], (DATA, 130, 199, 7, None)]) == [range(3)]
