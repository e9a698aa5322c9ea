"""What is seen in batches: repeats, padding and mistakes in their numbers, in loops that really train."""

from __future__ import annotations

import random
import warnings
from collections import UserDict
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from perfagent.signals.batch_contents import Contents
from perfagent.signals.batch_fingerprint import Fingerprint, sampled
from perfagent.signals.batch_tensors import places_in
from perfagent.step.state import state

NO_LIMIT = {"overhead_budget_pct": 1e9}


class Encoder(nn.Module):
    def __init__(self, padding_idx=None):
        super().__init__()
        self.embedding = nn.Embedding(1000, 8, padding_idx=padding_idx)
        self.head = nn.Linear(8, 2)

    def forward(self, input_ids, attention_mask=None, labels=None):
        return self.head(self.embedding(input_ids).mean(1))


class Sentences(Dataset):
    """Of 4 to 16 words, each another one."""

    def __init__(self, count=256):
        make = random.Random(1)
        self.rows = [[make.randrange(1, 1000) for _ in range(make.randrange(4, 17))] for _ in range(count)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return torch.tensor(self.rows[index])


def collate(rows):
    """As a tokenizer of transformers pads."""
    padded = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return {"input_ids": padded, "attention_mask": (padded > 0).long(), "labels": torch.ones(len(rows)).long()}


def padding_in(batches):
    padding = sum(int((batch["attention_mask"] == 0).sum()) for batch in batches)
    return 100 * padding / sum(batch["attention_mask"].numel() for batch in batches)


def train(model, batches, optimizer=None, *, inputs=lambda batch: batch[0]):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.01)
    for batch in batches:
        given = inputs(batch)
        out = model(**given) if isinstance(given, dict) else model(given)
        out.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def pairs(rows=64, *, columns=16, classes=4, seed=0):
    torch.manual_seed(seed)
    return TensorDataset(torch.randn(rows, columns), torch.randint(0, classes, (rows,)))


def newest(recorded, name):
    found = recorded.of(name)
    return found[-1][1] if found else None


# ---- padding


def test_padding_of_a_batch_of_transformers_is_its_mask_s_share_of_zeros(record):
    model = Encoder()
    recorded = record(model, **NO_LIMIT)
    loader = DataLoader(Sentences(), batch_size=16, collate_fn=lambda rows: UserDict(collate(rows)))
    for _ in range(10):
        train(model, loader, inputs=lambda batch: dict(batch))
    told = newest(recorded, "batch/padding_pct")
    assert told == pytest.approx(padding_in([collate(rows) for rows in batched(Sentences(), 16)]), abs=6)


def batched(dataset, size):
    return [[dataset[at] for at in range(begin, begin + size)] for begin in range(0, len(dataset), size)]


def test_padding_is_exact_for_the_batches_that_are_looked_into(record):
    model = Encoder()
    recorded = record(model, **NO_LIMIT)
    loader = DataLoader(Sentences(160), batch_size=16, collate_fn=collate)  # ten batches: the first is looked into
    train(model, loader, inputs=dict)
    first = collate(batched(Sentences(160), 16)[0])
    assert newest(recorded, "batch/padding_pct") == pytest.approx(padding_in([first]))


def with_lengths(rows):
    lengths = torch.tensor([len(row) for row in rows])
    return {
        "x": nn.utils.rnn.pad_sequence([row.float()[:, None] for row in rows], batch_first=True),
        "lengths": lengths,
    }


def tuple_with_lengths(rows):
    batch = with_lengths(rows)
    return batch["x"], torch.zeros(len(rows)), batch["lengths"]


def with_padding_mask(rows):
    batch = collate(rows)
    return {"tokens": batch["input_ids"], "src_key_padding_mask": batch["attention_mask"] == 0}


def with_bare_mask(rows, *, one=1):
    batch = collate(rows)
    return {"tokens": batch["input_ids"], "mask": (batch["attention_mask"] == one).long()}


@pytest.mark.parametrize(
    "collate_rows",
    [
        collate,
        with_lengths,
        tuple_with_lengths,
        with_padding_mask,
        with_bare_mask,
        lambda rows: with_bare_mask(rows, one=0),
    ],
    ids=["attention_mask", "lengths", "lengths in a tuple", "padding mask", "mask", "mask, inverted"],
)
def test_padding_is_known_from_masks_and_lengths(record, collate_rows):
    record(**NO_LIMIT)
    contents = Contents(state.current)
    told = [look_into(contents, collate_rows(rows)) for rows in batched(Sentences(), 16)]
    expected = [padding_in([collate(rows)]) for rows in batched(Sentences(), 16)]
    assert told[-1]["batch/padding_pct"] == pytest.approx(expected[-1])


def look_into(contents, batch, iteration=1):
    """Looks into this very batch, which a step follows."""
    contents._looked = 10 * contents._looked  # so that it is its turn
    contents.look(iteration, batch)
    state.current.completed += 1
    return contents.report()


def test_padding_without_a_mask_is_known_from_the_model_s_embedding(record):
    model = Encoder(padding_idx=0)
    recorded = record(model, **NO_LIMIT)
    loader = DataLoader(Sentences(), batch_size=16, collate_fn=lambda rows: (collate(rows)["input_ids"], torch.ones(1)))
    for _ in range(10):
        train(model, loader)
    assert newest(recorded, "batch/padding_pct") > 20


def test_what_is_no_padding_is_not_told_as_padding(record):
    """Labels of -100, class labels beside images, ids whose padding nobody knows."""
    record(**NO_LIMIT)
    for batch in (
        {"input_ids": torch.randint(0, 9, (8, 16)), "labels": torch.full((8, 16), -100)},
        (torch.randn(8, 3, 10, 10), torch.randint(0, 10, (8,))),
        (torch.randint(0, 9, (8, 16)), torch.randint(0, 9, (8, 16))),
        {"special_tokens_mask": torch.ones(8, 16).long(), "input_ids": torch.randint(0, 9, (8, 16))},
    ):
        assert "batch/padding_pct" not in look_into(Contents(state.current), batch)


def test_padding_of_a_loop_without_a_loader_is_read_from_the_model_s_call(record):
    model = Encoder()
    recorded = record(model, **NO_LIMIT)
    batches = [collate(rows) for rows in batched(Sentences(), 16)] * 8
    train(model, batches, inputs=dict)
    assert newest(recorded, "batch/padding_pct") == pytest.approx(padding_in(batches), abs=6)
    assert not recorded.of("batch/repeats"), "without a loader, nobody knows where an epoch begins"


# ---- repeats


class OneCopyForEachWorker(IterableDataset):
    """Forgets to give each worker its own part."""

    def __iter__(self):
        make = torch.Generator().manual_seed(3)
        for _ in range(64):
            yield torch.randn(16, generator=make), torch.randint(0, 9, (1,), generator=make)


def repeats(record, loaders, model=None):
    model = model or nn.Linear(16, 2)
    recorded = record(model, **NO_LIMIT)
    for loader in loaders:
        train(model, loader)
    return newest(recorded, "batch/repeats"), newest(recorded, "batch/distinct")


def test_a_shuffled_loader_repeats_nothing_in_ten_epochs(record):
    assert repeats(record, [DataLoader(pairs(), batch_size=8, shuffle=True)] * 10) == (0, None)


def test_the_same_order_in_every_epoch_is_no_repeat(record):
    assert repeats(record, [DataLoader(pairs(), batch_size=8)] * 10)[0] == 0


def test_one_batch_that_is_all_of_the_data_is_no_repeat(record):
    assert repeats(record, [DataLoader(pairs(), batch_size=64)] * 10)[0] == 0


def test_workers_that_each_read_all_of_the_data_are_seen(record):
    loader = DataLoader(OneCopyForEachWorker(), batch_size=8, num_workers=2)
    assert repeats(record, [loader]) == (8, 8)


def test_the_same_batch_at_every_step_is_seen(record):
    loader = DataLoader(pairs(), batch_size=8)
    batches = (next(iter(loader)) for _ in range(20))
    assert repeats(record, [batches]) == (19, 1)


def test_a_new_batch_of_a_loader_that_is_begun_for_each_is_no_repeat(record):
    loader = DataLoader(pairs(4096), batch_size=8, shuffle=True)
    assert repeats(record, [(next(iter(loader)) for _ in range(40))])[0] == 0


def test_an_epoch_that_holds_batches_twice_is_seen_when_it_ends(record):
    data = pairs(64)
    batches = [[*range(begin, begin + 8)] for begin in range(0, 64, 8)]
    random.Random(1).shuffle(batches)
    again = batches + [batches[at] for at in (5, 2, 6, 1)]
    assert repeats(record, [DataLoader(data, batch_sampler=again)])[0] == 4


class Endless(IterableDataset):
    """Passes over the same data again and again, in the same order."""

    def __iter__(self):
        data = pairs(64)
        while True:
            yield from data


def test_the_next_pass_of_a_loader_without_an_end_is_no_repeat(record):
    def some():
        for number, batch in enumerate(DataLoader(Endless(), batch_size=8)):
            if number == 50:
                return
            yield batch

    assert repeats(record, [some()])[0] == 0


def test_samples_one_by_one_may_be_drawn_twice(record):
    sampler = torch.utils.data.RandomSampler(pairs(32), replacement=True, num_samples=100)
    model = nn.Linear(16, 2)
    recorded = record(model, **NO_LIMIT)
    train(model, DataLoader(pairs(32), batch_size=1, sampler=sampler))
    assert newest(recorded, "batch/repeats") <= 8, "only those that were drawn twice in a row"


def test_a_loader_of_evaluations_counts_for_nothing(record):
    model = nn.Linear(16, 2)
    recorded = record(model, **NO_LIMIT)
    loader, other = DataLoader(pairs(), batch_size=8, shuffle=True), DataLoader(pairs(seed=1), batch_size=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(5):
        train(model, loader, optimizer)
        model.eval()
        for _ in range(3):
            for x, _ in [next(iter(other)) for _ in range(3)]:
                with torch.no_grad():
                    model(x)
        model.train()
    assert newest(recorded, "batch/repeats") == 0


def test_persistent_workers_begin_a_new_epoch(record):
    loader = DataLoader(pairs(), batch_size=8, num_workers=1, persistent_workers=True)
    assert repeats(record, [loader] * 4)[0] == 0


def test_batches_of_an_iterable_are_looked_at_as_well(record):
    model = nn.Linear(16, 2)
    recorded = record(model, **NO_LIMIT)
    data = list(DataLoader(pairs(), batch_size=8))
    for _ in range(3):
        train(model, recorded.run.batches([data[0], *data]))
    assert newest(recorded, "batch/repeats") == 3


def fingerprint(tensors):
    return Fingerprint([(place.path, place.tensor) for place in places_in(tensors)]).of(tensors)


def test_fingerprints_of_different_batches_differ_and_of_equal_ones_do_not():
    """Dense and sparse data, in all types that loaders give."""
    torch.manual_seed(0)
    makers = [
        lambda: torch.randn(8, 3, 16, 16),
        lambda: torch.rand(32, 784) * (torch.rand(32, 784) > 0.8),
        lambda: torch.randint(0, 50_000, (4, 128)),
        lambda: torch.randint(0, 256, (8, 3, 8, 8), dtype=torch.uint8),
        lambda: torch.randn(16, 16).bfloat16(),
        lambda: torch.randn(16, 16).half(),
        lambda: torch.randn(16, 16).double(),
        lambda: torch.randint(0, 256, (16, 16)).float(),
        lambda: (torch.rand(64, 16) > 0.5).float(),
    ]
    for make in makers:
        batches = [make() for _ in range(400)]
        marks = [fingerprint([batch]) for batch in batches]
        known = [mark for mark in marks if mark is not None]
        assert len(known) > 200
        assert len(set(known)) == len(known)
        assert [fingerprint([batch.clone()]) for batch in batches[:50]] == marks[:50]


def few_contents(count):
    """Data of few different numbers, as one tensor of `count` batches each."""
    yield "small whole numbers", torch.randint(0, 7, (count, 16, 1)).float().expand(count, 16, 8).contiguous()
    yield "small whole numbers, large", torch.randint(0, 7, (count, 24, 1)).half().expand(count, 24, 100).contiguous()
    yield "classes", nn.functional.one_hot(torch.randint(0, 3, (count, 40)), 3).float()
    yield "halves", torch.randint(0, 5, (count, 64)).half()
    yield "lengths", (torch.arange(256) < torch.randint(128, 257, (count, 8, 1))).to(torch.uint8)
    yield "counts", torch.randint(0, 20, (count, 32))


def test_batches_of_few_different_numbers_are_told_apart():
    """A byte of each of 64 numbers was not enough: 0, 2 and 8 as floats have the same third byte."""
    for seed in range(20):
        torch.manual_seed(seed)
        for kind, batches in few_contents(1000):
            fingerprints = Fingerprint([(place.path, place.tensor) for place in places_in([batches[0]])])
            known = {}
            for batch in batches:
                if (mark := fingerprints.of([batch])) is not None:
                    assert torch.equal(known.setdefault(mark, batch), batch), kind
            assert len(known) > 900, kind
            again = batches.clone()
            marks = [fingerprints.of([batch]) for batch in batches[:50]]
            assert marks == [fingerprints.of([batch]) for batch in again[:50]], kind


class _Wrapper(torch.Tensor):
    """Has no memory of its own, as a DTensor."""

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError(function)


def test_memory_that_is_not_there_is_not_read():
    whole = torch.randn(512)
    batch = [whole, whole[256:]]
    fingerprint = Fingerprint([(place.path, place.tensor) for place in places_in(batch)])
    parameter = nn.Parameter(torch.randn(512))
    assert all([fingerprint.of(batch), *map(sampled, [*batch, parameter])])
    whole.untyped_storage().resize_(0)
    parameter.untyped_storage().resize_(0)
    wrapper = torch.Tensor._make_wrapper_subclass(_Wrapper, (512,))
    assert fingerprint.of(batch) is None
    assert [*map(sampled, [*batch, parameter, wrapper])] == [b""] * 4


def test_batches_that_look_all_alike_have_no_fingerprint():
    assert fingerprint([torch.zeros(64, 784), torch.zeros(64).long()]) is None
    assert fingerprint([torch.rand(4, 2)]) is None
    assert fingerprint([torch.empty(0, 4)]) is None
    assert fingerprint([torch.rand(40, 40).T[:, ::2]]) is None, "it does not lie side by side"


# ---- mistakes in the numbers


class OneSample(Dataset):
    """Does not look at the index."""

    def __init__(self):
        self.row = torch.randn(16), torch.tensor(1)

    def __len__(self):
        return 640

    def __getitem__(self, index):
        return self.row


def test_rows_that_are_all_the_same_are_told(record):
    model = nn.Linear(16, 2)
    recorded = record(model, **NO_LIMIT)
    train(model, DataLoader(OneSample(), batch_size=8))
    assert newest(recorded, "batch/constant_pct") == 100.0


def test_inputs_of_one_value_are_told(record):
    record(**NO_LIMIT)
    contents = Contents(state.current)
    assert look_into(contents, (torch.zeros(2, 3, 8, 8), torch.tensor([0, 1])))["batch/constant_pct"] == 100.0
    assert look_into(contents, (torch.randn(2, 3, 8, 8), torch.tensor([0, 1])))["batch/constant_pct"] == 0.0


def black_border():
    pictures = torch.rand(8, 1, 256, 256)
    pictures[:, :, :20] = 0
    return pictures


def common_prompt():
    tokens = torch.randint(0, 9, (1, 8192)).repeat(8, 1)
    tokens[:, -3:] = torch.arange(24).view(8, 3)
    return tokens


def small_object(rows):
    pictures = torch.zeros(rows, 1, 512, 512)
    pictures[range(rows), 0, range(100, 100 + rows), 7] = 1.0
    return pictures


@pytest.mark.parametrize(
    "inputs",
    [black_border(), common_prompt(), small_object(8), small_object(2)],
    ids=["black border", "common prompt", "small object", "small object in two rows"],
)  # fmt: skip
def test_rows_that_are_alike_in_part_are_not_the_same(record, inputs):
    record(**NO_LIMIT)
    told = look_into(Contents(state.current), (inputs, torch.arange(len(inputs)) % 2))
    assert not told.get("batch/constant_pct"), "it is told from the first batch on that has any"


def test_long_rows_that_are_all_the_same_are_told(record):
    record(**NO_LIMIT)
    same = torch.rand(1, 1, 256, 256).repeat(8, 1, 1, 1)
    assert look_into(Contents(state.current), (same, torch.arange(8) % 2))["batch/constant_pct"] == 100.0


def test_labels_that_the_loss_leaves_out_are_told_from_the_first_one_on(record):
    record(**NO_LIMIT)
    contents = Contents(state.current)
    ids, labels = torch.randint(0, 9, (4, 8)), torch.randint(0, 9, (4, 8))
    assert "batch/ignored_pct" not in look_into(contents, {"input_ids": ids, "labels": labels})
    labels[:, :6] = -100
    assert look_into(contents, {"input_ids": ids, "labels": labels})["batch/ignored_pct"] == 75.0
    mask = {"input_ids": ids, "loss_mask": torch.zeros(4, 8)}
    assert look_into(contents, mask, iteration=2)["batch/ignored_pct"] == 100.0


def test_data_that_is_sorted_by_class_is_told(record):
    x, y = torch.randn(64, 16), torch.arange(64) // 16
    model = nn.Linear(16, 2)
    recorded = record(model, **NO_LIMIT)
    for _ in range(10):
        train(model, DataLoader(TensorDataset(x, y), batch_size=8))
    assert newest(recorded, "batch/one_class_pct") == 100.0


def test_rare_classes_are_not_sorted_by_class(record):
    x, y = torch.randn(640, 16), torch.zeros(640).long()
    y[torch.randperm(640)[:6]] = 1
    model = nn.Linear(16, 2)
    recorded = record(model, **NO_LIMIT)
    train(model, DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True))
    assert newest(recorded, "batch/one_class_pct") is None


def test_mean_and_spread_of_the_input_are_told(record):
    model = nn.Linear(16, 2)
    recorded = record(model, **NO_LIMIT)
    data = TensorDataset(100 + 20 * torch.randn(640, 16), torch.randint(0, 4, (640,)))
    train(model, DataLoader(data, batch_size=64))
    assert newest(recorded, "batch/input_mean") == pytest.approx(100, abs=4)
    assert newest(recorded, "batch/input_std") == pytest.approx(20, abs=2)


# ---- costs and what must not happen


@dataclass
class Batch:
    x: torch.Tensor
    y: torch.Tensor


@pytest.mark.parametrize(
    "batch",
    ["text", ["a", "b"], 3, None, {}, [], Batch(torch.randn(8, 4), torch.zeros(8)), torch.tensor(1.0), torch.empty(0, 3),
     torch.randn(4, 4).to_sparse(), torch.randn(8, 4, dtype=torch.complex64), [{"boxes": torch.zeros(0, 4)}],
     {1: torch.randn(8, 8)},
     torch.empty(8, 4, device="meta"),
     (torch.randn(8, 4).half(), torch.tensor([True] * 8)), torch.full((8, 4), float("nan"))],
)  # fmt: skip
def test_any_kind_of_batch_is_looked_at_or_left_alone(record, batch):
    record(**NO_LIMIT)
    contents = Contents(state.current)
    for _ in range(12):
        contents.look(1, batch)
        state.current.completed += 1
    contents.report()
    assert contents._rest == 0


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_left_alone(record, layout):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        batch = torch.nested.nested_tensor([torch.randn(2), torch.randn(3)], layout=layout)
    record(**NO_LIMIT)
    contents = Contents(state.current)
    contents.look(1, {"x": batch, "y": torch.randn(8, 8)})
    assert contents._epochs[1].plan is not None


def test_structures_that_alternate_are_looked_at_as_well(record):
    record(**NO_LIMIT)
    contents = Contents(state.current)
    for _ in range(20):
        for batch in ((torch.randn(8, 8), torch.randint(0, 9, (8,))), {"x": torch.randn(8, 8)}, [1, 2]):
            contents.look(1, batch)
        state.current.completed += 1
    assert contents.report()["batch/repeats"] == 0


def test_looks_stay_within_their_share_of_the_time(record):
    """Short steps: of most batches nothing is read."""
    recorded = record(overhead_budget_pct=0.5)
    contents = Contents(state.current)
    batch = torch.randn(64, 64), torch.randint(0, 9, (64,))
    for _ in range(20_000):
        contents.look(1, batch)
        state.current.completed += 1
    assert contents._looked < 2000
    del recorded


def test_nothing_of_a_batch_is_kept_alive(record):
    import weakref

    record(**NO_LIMIT)
    contents = Contents(state.current)
    batch = torch.randn(8, 8)
    gone = weakref.ref(batch)
    for _ in range(12):
        contents.look(1, batch)
    del batch
    assert gone() is None


def test_losses_weights_and_random_numbers_are_the_same_bit_by_bit(record):
    """With dropout, shuffling, augmentation in the collate function and workers that draw their seeds."""

    def trained(*, watch):
        torch.manual_seed(0)
        random.seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 4))
        recorded = record(model, **NO_LIMIT) if watch else None
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        losses = []
        for workers in (0, 1):
            for x, y in DataLoader(pairs(256), batch_size=16, shuffle=True, num_workers=workers):
                loss = nn.functional.cross_entropy(model(x + 0.1 * torch.randn_like(x)), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        if recorded is not None:
            assert recorded.of("batch/repeats")
        weights = [one.tolist() for one in model.parameters()]
        return losses, weights, torch.get_rng_state().tolist(), random.getstate()

    assert trained(watch=True) == trained(watch=False)
