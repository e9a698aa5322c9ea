"""What comes out of a loader, and which steps it is counted for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from agent.hooks.loops import one_ahead, sgd, step
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import perfagent.signals.compiled  # noqa: F401 - as the sender's thread does


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


def test_batches_of_two_kinds_from_one_loader_are_all_seen(record):
    class Tasks(IterableDataset):
        def __iter__(self):
            for number in range(12):
                yield {"input_ids": torch.zeros(4, 6, dtype=torch.long)} if number % 4 else {"x": torch.zeros(3, 8)}

    recorded, model, optimizer = start(record, nn.ModuleDict({"words": nn.Embedding(9, 8), "head": nn.Linear(8, 1)}))
    for batch in DataLoader(Tasks(), batch_size=None):
        step(optimizer, model["head"](model["words"](batch["input_ids"]) if "input_ids" in batch else batch["x"]))
    assert recorded.consumed() == {number: 4 if (number - 1) % 4 else 3 for number in range(2, 13)}


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


def test_a_batch_that_the_loop_skips_is_none_of_a_step(record):
    recorded, model, optimizer = start(record)
    for batch in loader_of(2, 3, 9, 4, 5, 9, 9, 6, 7):
        if len(batch) < 9:
            step(optimizer, model(batch))
    assert sizes_of(recorded) == [3, 4, 5, 6, 7]


def test_a_batch_at_which_a_loop_broke_off_is_none_of_the_next(record):
    recorded, model, optimizer = start(record)
    for size in (2, 3, 4, 5, 6):
        for number, batch in enumerate(DataLoader(torch.randn(16, 8), batch_size=size)):
            if number == 2:
                break
            step(optimizer, model(batch))
    assert sizes_of(recorded) == [2, 3, 3, 4, 4, 5, 5, 6, 6]


def test_batches_that_are_fetched_one_ahead_keep_their_order(record):
    recorded, model, optimizer = start(record)
    for _ in range(3):
        for batch in one_ahead(loader_of(2, 3, 4)):
            step(optimizer, model(batch))
    assert sizes_of(recorded) == [3, 4, 2, 3, 4, 2, 3, 4]


def test_batches_that_are_fetched_in_bursts_keep_their_order(record):
    """Some are fetched together and sorted; the steps that follow fetch none."""
    recorded, model, optimizer = start(record)
    source = iter(loader_of(*range(2, 11)))
    for _ in range(3):
        for batch in [next(source) for _ in range(3)]:
            step(optimizer, model(batch))
    assert sizes_of(recorded) == [3, 4, 5, 6, 7, 8, 9, 10]


@pytest.mark.parametrize("evaluate", [True, False])
def test_a_call_that_tells_no_size_is_with_the_whole_batch(record, evaluate):
    class Pairs(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.Linear(8, 4)

        def forward(self, sides, labels):
            return self.encoder(sides[0]["x"]) * self.encoder(sides[1]["x"])

    recorded, model, optimizer = start(record, Pairs())
    for _ in range(2):
        source = iter(DataLoader([{"x": torch.randn(size, 8)} for size in (8, 7, 6, 3)], batch_size=None))
        batch = next(source)
        while batch is not None:
            if evaluate:  # a step that begins with no fetch: the calls that follow may be with parts of a batch
                with recorded.run.phase("eval"):
                    pass
            following = next(source, None)
            step(optimizer, model([batch, batch], None))
            batch = following
    assert sizes_of(recorded) == [7, 6, 3, 8, 7, 6, 3]


@pytest.mark.parametrize("loads", [True, False])
def test_two_calls_before_one_backward_pass_are_of_one_batch(record, loads):
    """Two towers in one, each with half of the batch; points inside of a domain, and a few on its boundary."""
    recorded, model, optimizer = start(record, nn.Sequential(nn.Linear(8, 4)))
    for batch in loader_of(8, 8, 8, 8) if loads else [torch.randn(8, 8)] * 4:
        first, second = (batch[:4], batch[4:]) if loads else (batch, batch[:2])
        step(optimizer, model(first).square(), model(second).square())
    assert recorded.consumed() == dict.fromkeys(range(2, 5), 8)


@pytest.mark.parametrize("passes", [1, 2])
def test_a_critic_that_learns_after_its_generator_takes_no_batch(record, passes):
    """Both are parts of the model that is watched, so that its calls tell a size, too. passes: of the critic's
    losses."""

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.generator, self.critic = nn.Linear(8, 8), nn.Linear(8, 1)

        def forward(self, x):
            return self.critic(x)

    both = Both()
    ours, other = sgd(both.generator), sgd(both.critic)
    recorded = record(both)
    for _ in range(2):
        for batch in DataLoader(torch.randn(14, 8), batch_size=4):
            fake = both.generator(torch.randn(len(batch), 8))
            step(ours, both(fake).square())
            other.zero_grad()
            for loss in [both(batch).mean(), -both(fake.detach()).mean()][:passes]:
                loss.backward()
            other.step()
    assert sizes_of(recorded) == [4, 4, 2, 4, 4, 4, 2]


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


def test_a_second_look_at_a_batch_takes_none_that_waits(record):
    """Sharpness-aware minimization."""
    recorded, model, optimizer = start(record)
    for _ in range(3):
        for batch in one_ahead(DataLoader(torch.randn(14, 8), batch_size=4)):
            model(batch).square().mean().backward()
            optimizer.zero_grad()
            step(optimizer, model(batch).square())
    assert recorded.consumed() == {number: 4 if number % 4 else 2 for number in range(2, 13)}


@pytest.mark.usefixtures("nothing_compiled")
def test_a_critic_and_its_actor_learn_from_one_drawn_batch(record):
    """Off-policy reinforcement learning has no loader: both calls tell a size, and only what one of them has was
    drawn."""
    policy = nn.ModuleDict({"actor": nn.Linear(8, 2), "critic": nn.Linear(10, 4)})
    critic, actor = sgd(policy["critic"]), sgd(policy["actor"])
    recorded = record(policy, optimizer=critic)
    for number in range(1, 11):
        seen, done = torch.randn(4, 8), torch.randn(4, 2)
        step(critic, policy["critic"](torch.cat([seen, done], 1)).square())
        if number % 2:
            step(actor, -policy["critic"](torch.cat([seen, policy["actor"](seen)], 1)))
    assert recorded.consumed() == dict.fromkeys(range(4, 11), 4)


def test_of_more_than_two_passes_the_batch_is_not_known(record):
    model, other = nn.Linear(8, 1), nn.Linear(8, 1)
    ours, beside = sgd(model), sgd(other)
    recorded = record(model, optimizer=ours)
    for number in range(1, 9):
        for _ in range(3 if number > 4 else 0):
            step(beside, (other(torch.randn(4, 8)) - model(torch.randn(4, 8))).square())
        step(ours, model(torch.randn(4, 8)).square())
    assert recorded.consumed() == dict.fromkeys(range(2, 5), 4)


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


def test_of_sequences_now_and_then_long_hardly_one_is_missed(record):
    """After many that are taken whole the next long one is only known by its second part."""
    recorded, model, optimizer = start(record, Recurrent())
    lengths = [40, 40, 10, 10, 40, 10, 40, 40, *[10] * 12, 40, 40]
    true, long_at = [], []
    for batch in DataLoader([torch.randint(0, 9, (4, length + 1)) for length in lengths], batch_size=None):
        long_at.append(len(true) + 1)
        true += train_in_parts(model, optimizer, batch, 10)
    unknown = long_at[-2]  # the first long one after twelve short ones: told as it was fetched
    told = recorded.consumed("tokens")
    expected = {number: tokens for number, tokens in enumerate(true, 1) if number > 1}
    for number in (*long_at[-14 + 8 : -2], unknown):  # of these it is known again that they are taken whole
        expected[number] = told[number]
    assert told == expected
    assert told[unknown] == 4 * 41


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


@pytest.mark.parametrize(("collate", "calls"), [(dicts, 1), (list, 1), (a_dict, 1), (dicts, 2)])
def test_where_the_loop_makes_the_tokens_the_models_call_tells(record, collate, calls):
    recorded, model, optimizer = start(record, Classifier())
    consumed = []
    for number, _ in enumerate(DataLoader(["some text"] * 64, batch_size=8, collate_fn=collate), 1):
        # of half of the batch, as GRPO takes what it has generated
        tokens = torch.ones(4, 4 + number, dtype=torch.long)
        step(optimizer, *(model(input_ids=tokens) for _ in range(calls)))
        consumed.append(tokens.numel())
    if calls == 1:
        assert recorded.consumed("tokens") == dict(enumerate(consumed[1:], 2))
        assert recorded.consumed() == dict.fromkeys(range(2, 9), 4)
    else:
        assert recorded.consumed("tokens") == {}, "of two calls it is not known what they share"


def test_pairs_of_texts_are_as_many_samples_as_the_loader_gives(record):
    """The model is called with both texts of each: contrastive learning, preferences."""
    recorded, model, optimizer = start(record, Classifier())
    for _ in DataLoader([("a question", "its answer")] * 32, batch_size=4):
        step(optimizer, model(input_ids=torch.ones(8, 7, dtype=torch.long)))
    assert recorded.consumed() == dict.fromkeys(range(2, 9), 4)
    assert recorded.consumed("tokens") == dict.fromkeys(range(2, 9), 56)


def test_tokens_are_told_of_all_steps_or_of_none(record):
    """Calls are looked at for a while behind one without a loader, as that of a validation on a batch made by hand."""
    recorded, model, optimizer = start(record, Classifier())
    ids = torch.ones(4, 6, dtype=torch.long)
    for number, _ in enumerate(DataLoader([{"ids": torch.ones(6), "y": torch.tensor(1.0)}] * 96, batch_size=4), 1):
        step(optimizer, model(input_ids=ids))
        if number == 5:
            model(ids)
    assert recorded.consumed() == dict.fromkeys(range(2, 25), 4)
    assert recorded.consumed("tokens") == {}


@pytest.mark.parametrize("evaluates", [True, False])
def test_what_a_loader_tells_of_tokens_stands(record, evaluates):
    """Also after a loader of texts, and where the model is called with what the loop has cut from them."""
    recorded, model, optimizer = start(record, Classifier())
    for _ in range(2):
        for batch in DataLoader([{"input_ids": torch.ones(5, 6, dtype=torch.long)}] * 4, batch_size=None):
            step(optimizer, model(batch["input_ids"][:, :3]))
        if evaluates:
            model.eval()
            for _ in DataLoader(["some text"] * 8, batch_size=4, collate_fn=dicts):
                with torch.no_grad():
                    model(torch.ones(4, 9, dtype=torch.long))
            model.train()
    assert set(recorded.consumed("tokens").values()) == {30}
    assert set(sizes_of(recorded)) == {5}
