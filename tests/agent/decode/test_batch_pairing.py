"""What comes out of a loader, and which steps it is counted for."""

from __future__ import annotations

from itertools import islice
from types import SimpleNamespace

import pytest
import torch
from agent.hooks.loops import one_ahead, sgd, step
from torch import nn
from torch.utils.data import DataLoader


def start(record, model=None):
    model = model or nn.Linear(8, 1)
    return record(model), model, sgd(model)


def sizes_of(recorded) -> list[int]:
    """Samples of each step from the second on, the first that has a rate."""
    return [*recorded.consumed().values()]


def loader_of(*sizes):
    """One that gives batches of these sizes, in this order."""
    return DataLoader([torch.randn(size, 8) for size in sizes], batch_size=None)


# ---- what a batch is


def lists(items):
    return [[item] for item in items]


def objects(items):
    return SimpleNamespace(x=torch.stack(items))


@pytest.mark.parametrize("collate", [lists, objects])
def test_lists_and_objects_of_a_loader_tell_their_samples(record, collate):
    recorded, model, optimizer = start(record)
    for batch in DataLoader(torch.randn(18, 8), batch_size=4, collate_fn=collate):
        step(optimizer, *([model(image) for (image,) in batch] if collate is lists else [model(batch.x)]))
    assert recorded.consumed() == {2: 4, 3: 4, 4: 4, 5: 2}


# ---- whose batch it is


def test_a_loader_that_feeds_no_backward_pass_shifts_no_sizes(record):
    """Statistics between the epochs: the next iterator gets the id of one that is gone."""
    recorded, model, optimizer = start(record)
    training, other = (DataLoader(torch.randn(16, 8), batch_size=size) for size in (4, 8))
    for _ in range(5):
        for batch in training:
            step(optimizer, model(batch))
        for batch in other:
            batch.mean()
    assert recorded.consumed() == dict.fromkeys(range(2, 21), 4)
    assert recorded.series("batch/epoch") == {1: 1.0, 5: 2.0, 9: 3.0, 13: 4.0, 17: 5.0}


def skipping(loader):
    return (batch for batch in loader if len(batch) < 9)


def in_bursts(loader):
    """Some are fetched together and sorted; the steps that follow fetch none."""
    source = iter(loader)
    while group := [*islice(source, 3)]:
        yield from group


@pytest.mark.parametrize(
    ("order", "sizes", "trained"),
    [
        (skipping, (2, 3, 9, 4, 5, 9, 9, 6, 7), (2, 3, 4, 5, 6, 7)),
        (one_ahead, (2, 3, 4), (2, 3, 4)),
        (in_bursts, (2, 3, 4, 5, 6, 7, 8, 9, 10), (2, 3, 4, 5, 6, 7, 8, 9, 10)),
    ],
)
def test_batches_are_those_that_were_trained_on_in_order(record, order, sizes, trained):
    recorded, model, optimizer = start(record)
    for _ in range(3):
        for batch in order(loader_of(*sizes)):
            step(optimizer, model(batch))
    assert sizes_of(recorded) == [*trained * 3][1:]
    assert recorded.series("batch/epoch") == {1 + epoch * len(trained): 1.0 + epoch for epoch in range(3)}


@pytest.mark.parametrize("critic_first", [True, False])
def test_a_generator_and_its_critic_have_one_batch(record, critic_first):
    """Though the next one waits."""
    generator, critic = nn.Linear(8, 16), nn.Linear(16, 1)
    ours, other = sgd(generator), sgd(critic)
    recorded = record(generator)
    for _ in range(3):
        for batch in one_ahead(DataLoader(torch.randn(14, 16), batch_size=4)):

            def learn(batch=batch):
                step(other, critic(batch), -critic(generator(torch.randn(len(batch), 8)).detach()))

            if critic_first:
                learn()
            step(ours, critic(generator(torch.randn(len(batch), 8))))
            if not critic_first:
                learn()
        with torch.no_grad():
            generator.eval()(torch.randn(3, 8))
        generator.train()
    assert recorded.consumed() == {number: 4 if number % 4 else 2 for number in range(2, 13)}


# ---- tokens


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.layer, self.head = nn.Embedding(9, 8), nn.GRU(8, 8, batch_first=True), nn.Linear(8, 9)

    def forward(self, tokens, state=None):
        outputs, state = self.layer(self.words(tokens), state)
        return self.head(outputs), state


def train_in_parts(model, optimizer, batch, length):
    """Truncated backpropagation through time: answers the tokens of each step."""
    state, told = None, []
    for begin in range(0, batch.shape[1] - 1, length):
        tokens = batch[:, begin : min(begin + length, batch.shape[1] - 1)]
        logits, state = model(tokens, state)
        state = state.detach()
        targets = batch[:, begin + 1 : begin + 1 + tokens.shape[1]]
        step(optimizer, nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()))
        told.append(tokens.numel())
    return told


def test_a_sequence_taken_in_parts_tells_the_tokens_of_each(record):
    recorded, model, optimizer = start(record, Recurrent())
    true = []
    for batch in DataLoader(torch.randint(0, 9, (32, 41)), batch_size=4):
        true += train_in_parts(model, optimizer, batch, 12)
    assert recorded.consumed("tokens") == dict(enumerate(true[1:], 2))
    assert set(sizes_of(recorded)) == {4}


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(9, 8), nn.Linear(8, 1)

    def forward(self, input_ids):
        return self.head(self.words(input_ids)).mean()


def dicts(texts):
    """A batch of texts as they are; the loop makes tokens of them."""
    return [{"text": text} for text in texts]


def a_dict(texts):
    return {"text": texts}


TEXTS, PAIRS = ["some text"] * 64, [("a question", "its answer")] * 64


@pytest.mark.parametrize(
    ("texts", "collate", "rows", "calls"),
    [(TEXTS, dicts, 4, 1), (TEXTS, list, 4, 1), (TEXTS, a_dict, 4, 1), (TEXTS, dicts, 4, 2), (PAIRS, None, 16, 1)],
)
def test_where_the_loop_makes_the_tokens_the_models_call_tells(record, texts, collate, rows, calls):
    """Of half of the batch, as GRPO takes what it has generated; of both texts of each pair: contrastive learning."""
    recorded, model, optimizer = start(record, Classifier())
    consumed = []
    for number, _ in enumerate(DataLoader(texts, batch_size=8, collate_fn=collate), 1):
        tokens = torch.ones(rows, 4 + number, dtype=torch.long)
        step(optimizer, *(model(input_ids=tokens) for _ in range(calls)))
        consumed.append(tokens.numel())
    if calls == 1:
        assert recorded.consumed("tokens") == dict(enumerate(consumed[1:], 2))
        assert recorded.consumed() == dict.fromkeys(range(2, 9), min(rows, 8))
    else:
        assert recorded.consumed("tokens") == {}, "of two calls it is not known what they share"
