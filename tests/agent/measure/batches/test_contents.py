"""What is seen in batches: repeats, padding and mistakes in their numbers, in loops that really train."""

from __future__ import annotations

import random
from collections import UserDict
from dataclasses import dataclass
from itertools import cycle, islice

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from perfagent.measure.batches.contents import Contents
from perfagent.measure.batches.places import places_in
from perfagent.measure.batches.repeats import Fingerprint, content_of
from perfagent.step.state import state

NO_LIMIT = {"overhead_budget_pct": 1e9}


IDS = nn.utils.rnn.pad_sequence([torch.arange(1, length + 1) for length in (9, 3, 4)], batch_first=True)
LENGTHS, IS_TOKEN = torch.tensor([9, 3, 4]), (IDS > 0).long()
PADDING_PCT = pytest.approx(100 * (1 - 16 / 27))


def train(model, batches):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for x, _ in batches:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def pairs(rows=64, *, columns=16, classes=4, seed=0):
    torch.manual_seed(seed)
    return TensorDataset(torch.randn(rows, columns), torch.randint(0, classes, (rows,)))


def newest(recorded, name):
    found = recorded.of(name)
    return found[-1][1] if found else None


@pytest.fixture
def contents(record):
    record(**NO_LIMIT)
    return Contents(state.current)


def look_into(contents, batch, iteration=1):
    """What is told of this very batch: one in ten is looked into."""
    for _ in range(10):
        contents.inspect(iteration, batch)
    state.current.completed += 1
    return reported(contents)


def reported(contents):
    state.current.rows.clear()
    contents.report()
    return {name: value for row in state.current.rows for name, value in zip(row[3], row[4], strict=True)}


# ---- padding


PADDING = {
    "attention mask": ({"input_ids": IDS, "attention_mask": IS_TOKEN}, PADDING_PCT),
    "in transformers' dictionary": (UserDict({"input_ids": IDS, "attention_mask": IS_TOKEN}), PADDING_PCT),
    "lengths": ({"x": IDS.float()[..., None], "lengths": LENGTHS}, PADDING_PCT),
    "padding mask": ({"tokens": IDS, "src_key_padding_mask": IDS == 0}, PADDING_PCT),
    "ignored labels": ({"input_ids": IDS, "labels": torch.full((3, 9), -100)}, None),
    "class labels": ((torch.randn(8, 3, 10, 10), torch.randint(0, 10, (8,))), None),
    "nobody knows": ((IDS, IDS), None),
    "lengths without a name": ((IDS.float(), LENGTHS), None),
    "samples of a recording": ({"x": IDS.float()[..., None], "lengths": 1000 * LENGTHS}, None),
    "other mask": ({"special_tokens_mask": IS_TOKEN, "input_ids": IDS}, None),
}


@pytest.mark.parametrize("kind", PADDING)
def test_padding_is_known_from_masks_and_lengths(contents, kind):
    batch, pct = PADDING[kind]
    assert look_into(contents, batch).get("batch/padding_pct") == pct


def test_the_padding_token_of_the_model_tells_padding(record):
    model = nn.Embedding(1000, 4, padding_idx=0)
    recorded = record(model, **NO_LIMIT)
    for _ in range(20):
        train(model, DataLoader([0], collate_fn=lambda _: (IDS, None)))
    assert newest(recorded, "batch/padding_pct") == PADDING_PCT


# ---- repeats


class Endless(IterableDataset):
    """The same data again and again."""

    def __iter__(self):
        return cycle(pairs(64))


def an_epoch_with_batches_twice():
    batches = [range(begin, begin + 8) for begin in range(0, 64, 8)]
    random.Random(1).shuffle(batches)
    return DataLoader(pairs(64), batch_sampler=batches + [batches[at] for at in (5, 2, 6, 1)])


def first_ones(loader, count):
    """The loader is begun for each batch."""
    return (next(iter(loader)) for _ in range(count))


LOADERS = {
    "shuffled": lambda: ([DataLoader(pairs(), batch_size=8, shuffle=True)] * 10, (0, None)),
    "the same order": lambda: ([DataLoader(pairs(), batch_size=8)] * 10, (0, None)),
    "always the first batch": lambda: ([first_ones(DataLoader(pairs(), batch_size=8), 20)], (19, 1)),
    "batches twice in an epoch": lambda: ([an_epoch_with_batches_twice()], (4, 8)),
    "endless": lambda: ([islice(DataLoader(Endless(), batch_size=8), 50)], (0, None)),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_batches_that_come_again_within_an_epoch_are_counted(record, kind):
    loaders, expected = LOADERS[kind]()
    model = nn.Linear(16, 2)
    recorded = record(model, **NO_LIMIT)
    for loader in loaders:
        train(model, loader)
    assert (newest(recorded, "batch/repeats"), newest(recorded, "batch/distinct")) == expected


def test_a_loader_of_evaluations_counts_for_nothing(record):
    model = nn.Linear(16, 2)
    recorded = record(model, **NO_LIMIT)
    loader, other = DataLoader(pairs(), batch_size=8, shuffle=True), DataLoader(pairs(seed=1), batch_size=8)
    for _ in range(5):
        train(model, loader)
        model.eval()
        for x, _ in first_ones(other, 9):
            with torch.no_grad():
                model(x)
        model.train()
    assert newest(recorded, "batch/repeats") == 0


# ---- fingerprints


KINDS = {
    "numbers": lambda n: torch.randn(n, 8, 3, 16, 16),
    "tokens": lambda n: torch.randint(0, 50_000, (n, 4, 128)),
    "bytes": lambda n: torch.randint(0, 256, (n, 8, 3, 8, 8), dtype=torch.uint8),
    # a byte of each of 64 numbers was not enough: 0, 2 and 8 as floats have the same third byte
    "small whole numbers": lambda n: torch.randint(0, 7, (n, 16, 1)).float().expand(n, 16, 8).contiguous(),
}


@pytest.mark.parametrize("kind", KINDS)
def test_fingerprints_tell_batches_apart_and_know_equal_ones(kind):
    torch.manual_seed(0)
    batches = KINDS[kind](1000)
    of, known = Fingerprint(places_in([batches[0]])).of, {}
    for batch in batches:
        if (mark := of([batch])) is not None:
            assert torch.equal(known.setdefault(mark, batch), batch)
    assert len(known) > 600
    again = batches.clone()
    assert [of([batch]) for batch in batches[:50]] == [of([batch]) for batch in again[:50]]


def test_batches_that_look_all_alike_have_no_fingerprint():
    sliced = torch.rand(40, 40).T[:, ::2]  # does not lie side by side
    for batch in ([torch.zeros(64, 784), torch.zeros(64).long()], [torch.rand(4, 2)], [torch.empty(0, 4)], [sliced]):
        assert Fingerprint(places_in(batch)).of(batch) is None


class _Wrapper(torch.Tensor):
    """Has no memory of its own, as a DTensor."""

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError(function)


def test_memory_that_is_not_there_is_not_read():
    whole, parameter = torch.randn(512), nn.Parameter(torch.randn(512))
    batch = [whole, whole[256:]]
    known = Fingerprint(places_in(batch))
    assert all([known.of(batch), *map(content_of, [*batch, parameter])])
    whole.untyped_storage().resize_(0)
    parameter.untyped_storage().resize_(0)
    wrapper = torch.Tensor._make_wrapper_subclass(_Wrapper, (512,))
    assert known.of(batch) is None
    assert [*map(content_of, [*batch, parameter, wrapper])] == [b""] * 4


# ---- mistakes in the numbers


PICTURES, TOKENS = torch.rand(8, 1, 256, 256), torch.randint(0, 9, (4, 8))
BLACK_BORDER, PARTLY = PICTURES.clone(), TOKENS.clone()
BLACK_BORDER[:, :, :20], PARTLY[:, :6] = 0, -100
MISTAKES = {
    "one value": ((torch.zeros(2, 3, 8, 8), torch.arange(2)), {"batch/constant_pct": 100.0}),
    "long rows that are the same": ((PICTURES[:1].repeat(8, 1, 1, 1), torch.arange(8)), {"batch/constant_pct": 100.0}),
    "noise": ((torch.randn(2, 3, 8, 8), torch.arange(2)), {}),
    "black border": ((BLACK_BORDER, torch.arange(8)), {}),
    "labels that the loss leaves out": ({"input_ids": TOKENS, "labels": PARTLY}, {"batch/ignored_pct": 75.0}),
    "all labels count": ({"input_ids": TOKENS, "labels": TOKENS}, {}),
    "a mask of the loss": ({"input_ids": TOKENS, "loss_mask": torch.zeros(4, 8)}, {"batch/ignored_pct": 100.0}),
}


@pytest.mark.parametrize("kind", MISTAKES)
def test_mistakes_in_the_numbers_are_told(contents, kind):
    batch, expected = MISTAKES[kind]
    told = look_into(contents, batch)
    assert {name: told[name] for name in ("batch/constant_pct", "batch/ignored_pct") if name in told} == expected
    if isinstance(batch, tuple):
        spread = float(batch[0].mean()), float(batch[0].std())
        assert (told["batch/input_mean"], told["batch/input_std"]) == pytest.approx(spread, abs=0.1)


def rare_classes():
    y = torch.zeros(640).long()
    y[torch.randperm(640)[:6]] = 1
    return y


@pytest.mark.parametrize(
    ("y", "pct"), [(torch.arange(64) // 16, 100.0), (rare_classes(), None)], ids=["sorted", "rare classes"]
)
def test_data_that_is_sorted_by_class_is_told(record, y, pct):
    model = nn.Linear(16, 2)
    recorded = record(model, **NO_LIMIT)
    for _ in range(10):
        train(model, DataLoader(TensorDataset(torch.randn(len(y), 16), y), batch_size=8, shuffle=pct is None))
    assert newest(recorded, "batch/one_class_pct") == pct


# ---- costs and what must not happen


@dataclass
class Batch:
    x: torch.Tensor
    y: torch.Tensor


KINDS_OF_BATCHES = [
    "text", ["a", "b"], 3, None, {}, [], Batch(torch.randn(8, 4), torch.zeros(8)), torch.tensor(1.0), torch.empty(0, 3),
    torch.randn(4, 4).to_sparse(), torch.randn(8, 4, dtype=torch.complex64), [{"boxes": torch.zeros(0, 4)}],
    {1: torch.randn(8, 8)}, torch.empty(8, 4, device="meta"), (torch.randn(8, 4).half(), torch.tensor([True] * 8)),
    torch.full((8, 4), float("nan")),
]  # fmt: skip


def test_any_kind_of_batch_is_looked_at_or_left_alone(contents):
    """Each after another structure. What fails is turned off, and fails the fixture `record`."""
    for batch in [*KINDS_OF_BATCHES * 2, KINDS_OF_BATCHES[6]]:
        look_into(contents, batch)
    assert look_into(contents, KINDS_OF_BATCHES[6])["batch/input_std"] > 0.5


def test_looks_stay_within_their_share_of_the_time(record):
    """Short steps: of most batches nothing is read, and each that is read is a repeat here."""
    record(overhead_budget_pct=0.5)
    contents, batch = Contents(state.current), (torch.randn(64, 64), torch.randint(0, 9, (64,)))
    for _ in range(20_000):
        contents.inspect(1, batch)
        state.current.completed += 1
    assert 0 < reported(contents)["batch/repeats"] < 2000
