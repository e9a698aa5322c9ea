"""Samples and tokens of a batch, from its shape."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

import perfagent.signals.batch_size as module
from perfagent.signals.batch_size import Inputs, reader, size_of

Pair = namedtuple("Pair", "x y")


@dataclass(slots=True)
class Images:
    pixels: torch.Tensor
    labels: torch.Tensor


IDS = torch.zeros(4, 16, dtype=torch.long)
IMAGES = torch.zeros(6, 3, 8, 8)

BATCHES = {
    "images and labels": ((IMAGES, torch.zeros(6, dtype=torch.long)), (6, None)),
    "a list from the default collate": ([IMAGES, torch.zeros(6)], (6, None)),
    "a tensor": (IMAGES, (6, None)),
    "token ids": ({"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}, (4, 64)),
    "an ordered mapping": (OrderedDict(pixel_values=IMAGES, labels=torch.zeros(6)), (6, None)),
    "two matrices of tokens": ((IDS, IDS), (4, 64)),
    "a named tuple": (Pair(IMAGES, torch.zeros(6)), (6, None)),
    "a dict in a tuple": (({"input_ids": IDS}, "meta"), (4, 64)),
    "a dict alone in a tuple": (({"input_ids": IDS},), (4, 64)),
    "a dataclass": (Images(IMAGES, torch.zeros(6)), (6, None)),
    "an object with tokens": (SimpleNamespace(input_ids=IDS, attention_mask=None), (4, 64)),
    "an object that says what it is": (SimpleNamespace(kind="batch", of=[IMAGES]), (None, None)),
    "a list of dicts": ([{"x": 1}, {"x": 2}, {"x": 3}], (3, None)),
    "detection": (([torch.zeros(3, 5, 5), torch.zeros(3, 7, 7)], [{}, {}]), (2, None)),
    "packed into one row": (
        {"input_ids": torch.zeros(100, dtype=torch.long), "cu_seqlens": torch.zeros(4)},
        (None, 100),
    ),
    "a packed sequence": (torch.nn.utils.rnn.pack_sequence([torch.zeros(5, 2), torch.zeros(3, 2)]), (2, None)),
    "graphs": (SimpleNamespace(num_graphs=9), (9, None)),
    "token ids alone, from a TensorDataset": ([IDS], (4, 64)),
    "token ids in a mapping in a mapping": ({"inputs": {"input_ids": IDS}, "labels": torch.zeros(4)}, (4, 64)),
    "two views and labels, from the default collate": ([[IMAGES, IMAGES], torch.zeros(6)], (6, None)),
    "crops of several sizes and labels": ([[IMAGES, IMAGES[..., :4, :4]], torch.zeros(6), ["path"] * 6], (6, None)),
    "detection with labels": (([torch.zeros(3, 5, 5), torch.zeros(3, 7, 7)], torch.zeros(2)), (2, None)),
    "pairs of texts": ({"anchor_input_ids": IDS, "positive_input_ids": IDS[:, :9], "label": torch.zeros(4)}, (4, 100)),
    "texts of several rows": ({"query_input_ids": IDS, "passage_input_ids": IDS[:2]}, (None, None)),
    "a prompt and its positions": ({"prompt_input_ids": IDS, "position_ids": IDS}, (4, 64)),
    "a scalar": (torch.tensor(1.0), (None, None)),
    "text": ("hello", (None, None)),
    "nothing": ([], (None, None)),
    "no agreement": ([torch.zeros(2, 2), torch.zeros(3, 2)], (None, None)),
}


@pytest.mark.parametrize("name", BATCHES)
def test_size(name):
    batch, expected = BATCHES[name]
    assert size_of(batch)[:2] == expected
    assert reader(batch)(batch)[:2] == expected, "the cheap reader says something else"


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
@pytest.mark.parametrize("of", ["tokens", "numbers"])
def test_nested_tensors_have_samples_and_no_padding(layout, of):
    lengths = (5, 3, 9)
    parts = [torch.zeros(length, dtype=torch.long) if of == "tokens" else torch.zeros(length, 2) for length in lengths]
    nested = torch.nested.nested_tensor(parts, layout=layout)
    tokens = sum(lengths) if of == "tokens" else None
    for batch in (nested, [nested], {"input_ids": nested}, {"input_ids": nested, "labels": nested}):
        assert size_of(batch)[:2] == (3, tokens), type(batch)
        assert reader(batch)(batch)[:2] == (3, tokens), type(batch)
    for batch in ((nested, torch.zeros(3)), (nested, nested)):
        expected = tokens if batch[1] is nested else None
        assert reader(batch, 3)(batch)[:2] == (3, expected)


def test_views_without_labels_are_told_by_the_loaders_batch_size():
    measure = reader([[IMAGES, IMAGES], ["path"] * 6], 6)
    assert measure([[IMAGES, IMAGES], ["path"] * 6])[:2] == (6, None)
    assert measure([[IMAGES[:2], IMAGES[:2]], ["path"] * 2])[:2] == (2, None), "the last batch of an epoch"


def test_a_reader_of_objects_follows_them():
    measure = reader(Images(IMAGES, torch.zeros(6)), 6)
    assert measure(Images(IMAGES[:2], torch.zeros(2)))[:2] == (2, None), "the last batch of an epoch"
    assert measure(SimpleNamespace(x=IMAGES[:3]))[:2] == (3, None)
    assert measure((IMAGES, torch.zeros(6)))[:2] == (6, None)


def test_an_object_with_more_rows_than_the_loader_has_samples_holds_points_or_nodes():
    points = SimpleNamespace(features=torch.zeros(500, 3), where=torch.zeros(500, 3))
    assert reader(points, 4)(points)[:2] == (None, None)
    assert reader(points)(points)[:2] == (500, None)


def test_of_an_object_nothing_is_told_where_its_rows_may_be_something_else_than_samples():
    few, many = (SimpleNamespace(points=torch.zeros(count, 3)) for count in (5, 100))
    statistics = SimpleNamespace(x=torch.zeros(8, 3), mean=torch.zeros(3), std=torch.zeros(3))
    nodes = SimpleNamespace(x=torch.zeros(100, 5), edges=torch.zeros(2, 300), graph=torch.zeros(100))
    for batch, later, batch_size in ((few, many, 8), (statistics, statistics, 8), (nodes, nodes, None)):
        assert reader(batch, batch_size)(later)[:2] == (None, None)


class Raises:
    def __init__(self):
        self.x = IMAGES

    @property
    def num_graphs(self):
        raise RuntimeError("the script's own")

    def __getattr__(self, name):
        raise RuntimeError(f"the script's own: {name}")


def test_functions_of_a_batch_s_own_are_in_nobodys_way():
    assert reader(Raises(), len(IMAGES))(Raises())[0] == len(IMAGES)


def test_the_shape_of_what_is_in_an_object_is_known(monkeypatch):
    monkeypatch.setattr(module, "inputs", Inputs())
    measure = reader(Images(IMAGES, torch.zeros(6)))
    for pixels in (IMAGES, IMAGES, IMAGES[..., :4], IMAGES[..., :4]):
        measure(Images(pixels, torch.zeros(6)))
    assert [shape for _, shape in module.inputs.changes] == [(3, 8, 8), (3, 8, 4)]


def test_a_cheap_reader_follows_the_batch():
    measure = reader({"input_ids": IDS})
    assert measure({"input_ids": IDS[:3, :10]})[:2] == (3, 30)
    assert measure((IMAGES, torch.zeros(6)))[:2] == (6, None), "another kind of batch is measured afresh"


def test_a_reader_of_several_texts_follows_the_batch():
    measure = reader({"anchor_input_ids": IDS, "positive_input_ids": IDS, "anchor_modality": "text"})
    assert measure({"anchor_input_ids": IDS[:3], "positive_input_ids": IDS[:3, :5], "anchor_modality": "text"})[:2] == (
        3,
        63,
    )
    triplets = {"anchor_input_ids": IDS[:3], "positive_input_ids": IDS[:3], "negative_input_ids": IDS[:3]}
    assert measure(triplets)[:2] == (3, 144), "of another dataset"
    assert measure({"text_input_ids": IDS[:2]})[:2] == (2, 32)
    assert measure({"x": torch.zeros(5, 12)})[:2] == (5, None)


def test_a_reader_of_tokens_follows_a_loader_with_batches_of_two_kinds():
    measure = reader({"input_ids": IDS})
    assert measure({"x": torch.zeros(5, 12)})[:2] == (5, None)
    assert measure({"input_ids": torch.zeros(100, dtype=torch.long)})[:2] == (None, 100)
    assert reader((IDS, IDS))(("text", IDS))[:2] == (4, None)


LISTS = {
    "images and targets, as torchvision's references collate them": tuple(
        zip(*[(torch.zeros(3, 8, 8), {})] * 5, strict=True)
    ),
    "a list of images": [torch.zeros(3, 8, 8)] * 5,
    "a list of sequences": [torch.zeros(length, dtype=torch.long) for length in (7, 7, 7, 4, 9)],
    "a list of pairs": [(torch.zeros(3, 8, 8), 1)] * 5,
}


@pytest.mark.parametrize("name", LISTS)
def test_where_a_batch_lists_its_samples_the_loaders_batch_size_says_so(name):
    batch = LISTS[name]
    measure = reader(batch, 5)
    assert measure(batch)[:2] == (5, None)
    smaller = tuple(part[:3] for part in batch) if name.startswith("images and") else batch[:3]
    assert measure(smaller)[:2] == (3, None), "the last batch of an epoch"
    assert measure((IMAGES, torch.zeros(6)))[:2] == (6, None) or type(batch) is tuple


PAIRS = {
    "inputs and targets": (
        lambda rows: [{"image": IMAGES[:rows]}, {"label": torch.zeros(rows), "path": ["a"] * rows}],
        None,
    ),
    "tokens and targets": (lambda rows: ({"input_ids": IDS[:1].expand(rows, 16)}, {"label": torch.zeros(rows)}), 16),
    "both sides of a pair": (lambda rows: [{"input_ids": IDS[:1].expand(rows, 16)}] * 2, None),
    "what it is made of beside it": (
        lambda rows: ({"path": ["a"] * rows}, {"x": IMAGES[:rows]}, {"y": torch.zeros(rows)}),
        None,
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_several_mappings_with_a_row_for_each_sample_are_told_by_the_loaders_batch_size(name):
    batch, each = PAIRS[name]
    measure = reader(batch(6), 6)
    for rows in (6, 4):  # the last batch of an epoch
        assert measure(batch(rows))[:2] == (rows, each and each * rows)
    assert measure([{"x": torch.zeros(2)}, {"x": torch.zeros(3)}])[0] != 6, "batches of another kind"
    assert measure((IMAGES[:3], torch.zeros(3)))[:2] == (3, None)
    entries = [{"boxes": torch.zeros(found, 4)} for found in (1, 6, 2)]
    assert reader(entries, 6)(entries)[:2] == (3, None), "a sample an entry"


@pytest.mark.parametrize("batch_size", [None, 1, 2, 4, 6, 99])
@pytest.mark.parametrize("batch", [[IMAGES], [IMAGES, torch.zeros(6)], (IMAGES, torch.zeros(6), torch.zeros(6))])
def test_a_batch_size_that_says_nothing_of_the_batch_changes_nothing(batch, batch_size):
    if batch_size != len(batch) or batch_size == 1:
        assert reader(batch, batch_size)(batch)[:2] == (6, None)


SPEECH, TEXT = torch.zeros(20, 4, 8), torch.zeros(20, 4, dtype=torch.long)


@pytest.mark.parametrize(
    ("batch", "later", "sizes"),
    [
        ((SPEECH, torch.zeros(4, 5)), (SPEECH[:9, :3], torch.zeros(3, 5)), [(4, None), (3, None)]),
        ((SPEECH, torch.zeros(20, 4)), (SPEECH[:9, :3], torch.zeros(9, 3)), [(4, None), (3, None)]),
        ({"x": SPEECH, "y": torch.zeros(4, 5)}, {"x": SPEECH[:, :2], "y": torch.zeros(2, 5)}, [(4, None), (2, None)]),
        ([TEXT, TEXT], [TEXT[:7], TEXT[:7]], [(4, 80), (4, 28)]),
        ([TEXT, TEXT[:17]], [TEXT[:7, :3], TEXT[:9, :3]], [(4, None), (3, None)]),
    ],
    ids=["speech and targets", "all of it", "a mapping", "tokens", "two lengths"],
)
def test_where_time_comes_first_the_samples_are_second(batch, later, sizes):
    measure = reader(batch, 4)
    assert [measure(each)[:2] for each in (batch, later)] == sizes


class TestInputs:
    """When the shape of the input changed."""

    @pytest.fixture(autouse=True)
    def progress(self, monkeypatch):
        """How many steps are completed is up to the test."""
        progress = SimpleNamespace(completed=0)
        monkeypatch.setattr(module, "state", SimpleNamespace(current=progress))
        monkeypatch.setattr(module, "inputs", Inputs())
        return progress

    def shapes(self):
        return [shape for _, shape in module.inputs.changes]

    def read(self, *batches):
        measure = reader(batches[0])
        for batch in batches:
            measure(batch)
        return self.shapes()

    def test_it_is_noted_once_and_then_when_it_changes(self, progress):
        measure = reader((IMAGES, torch.zeros(6)))
        for step, side in enumerate((8, 8, 8, 16, 16)):
            progress.completed = step
            measure((torch.zeros(6, 3, side, side), torch.zeros(6)))
        assert [*module.inputs.changes] == [(0, (3, 8, 8)), (3, (3, 16, 16))]

    def test_a_loop_without_a_loader_is_seen_too(self):
        assert self.read(IMAGES, torch.zeros(6, 3, 8, 8), torch.zeros(6, 3, 4, 4)) == [(3, 8, 8), (3, 4, 4)]

    def test_the_largest_tensor_is_the_input(self):
        first, second = ({"labels": torch.zeros(8), "input_values": torch.zeros(8, length)} for length in (1000, 16000))
        assert self.read(first, second) == [(1000,), (16000,)]
        assert reader(first)(second)[:2] == (8, None)

    @pytest.mark.parametrize(
        "batch",
        [
            SimpleNamespace(num_graphs=9),
            ([torch.zeros(3, 5, 5), torch.zeros(3, 7, 7)], [{}, {}]),
            {"labels": torch.zeros(2), "images": [torch.zeros(3, 5, 5), torch.zeros(3, 7, 7)]},
            {"labels": torch.zeros(4), "points": torch.zeros(100, 3)},
            (SimpleNamespace(nodes=torch.zeros(50, 3)), torch.zeros(4)),
        ],
        ids=["graphs", "detection", "a list in a dict", "points", "an object"],
    )
    def test_where_no_tensor_holds_the_whole_input_its_shape_is_not_known(self, batch):
        reader(IMAGES)(IMAGES)  # an evaluation before
        assert self.read(batch, batch) == [(3, 8, 8), None]

    def test_of_a_batch_with_the_time_first_that_is_of_the_sample(self):
        measure = reader((SPEECH, torch.zeros(4, 5)), 4)
        for length, samples in ((20, 4), (20, 4), (9, 4), (9, 2)):
            measure((SPEECH[:length, :samples], torch.zeros(samples, 5)))
        assert self.shapes() == [(20, 8), (9, 8), (9, 8)]

    @pytest.mark.parametrize(
        ("batch", "batch_size", "samples"),
        [
            ([torch.zeros(10, 64, dtype=torch.long)] * 2, 64, 10),
            (
                dict.fromkeys(("input_ids", "attention_mask", "labels"), torch.zeros(128, 512, dtype=torch.long)),
                512,
                128,
            ),
            ([torch.zeros(2, 3, 8, 8)], 3, 2),
        ],
        ids=["the last", "a rank's part", "pictures"],
    )
    def test_fewer_samples_of_as_many_numbers_as_a_loader_s_batch_has_samples_are_no_time(
        self, batch, batch_size, samples
    ):
        assert reader(batch, batch_size)(batch)[0] == samples

    def test_names_and_numbers_are_no_input(self):
        assert self.read({"image": IMAGES, "path": ["a"] * 6, "more": {"index": torch.zeros(6)}, "scale": 2.0}) == [
            (3, 8, 8)
        ]

    def test_tokens_say_enough(self):
        assert self.read(IDS, IDS[:, :7], IDS[:, :3]) == []
        assert self.read({"input_ids": IDS}, {"input_ids": IDS[:, :7]}) == []

    def test_training_and_evaluation_take_turns(self):
        train, evaluation = reader((IMAGES, torch.zeros(6))), reader((torch.zeros(6, 3, 9, 9), torch.zeros(6)))
        for measure, side in ((train, 8), (evaluation, 9), (evaluation, 9), (train, 8), (train, 8)):
            measure((torch.zeros(6, 3, side, side), torch.zeros(6)))
        assert self.shapes() == [(3, 8, 8), (3, 9, 9), (3, 8, 8)]

    def test_another_run_begins_anew(self, progress):
        progress.completed = 5000
        self.read(IMAGES)
        progress.completed = 0
        self.read(IMAGES[:, :1])
        assert [*module.inputs.changes] == [(0, (1, 8, 8))]

    def test_what_nobody_takes_stays_bounded(self):
        measure = reader([torch.zeros(2, 1), torch.zeros(2)])
        for length in range(1, 3000):
            measure([torch.empty(2, length), torch.empty(2)])
        assert len(module.inputs.changes) == 1024

    def test_a_batch_without_that_tensor_is_measured_afresh(self):
        measure = reader([IMAGES, torch.zeros(6)])
        assert measure([])[:2] == (None, None)
        assert measure(["a", torch.zeros(6)])[:2] == (6, None)
        assert measure([torch.tensor(1.0), torch.zeros(6)])[:2] == (6, None)


@pytest.mark.parametrize("kind", [torch.bool, torch.complex64, torch.float32])
def test_matrices_of_other_than_whole_numbers_hold_no_tokens(kind):
    matrix = torch.zeros(4, 16, dtype=kind)
    for batch in (matrix, [matrix], (matrix, matrix), {"input_ids": matrix}):
        assert size_of(batch)[:2] == (4, None)


def test_a_loader_of_whole_batches_one_at_a_time_tells_their_samples():
    """batch_size=1 and a dataset that gives batches: a column of numbers has one number a sample, and that is no batch
    size."""
    batch = torch.zeros(20, 1), torch.zeros(20, 1)
    assert reader(batch, 1)(batch)[:2] == (20, None)


def test_one_row_beside_as_many_labels_as_it_is_long_may_be_packed_and_says_nothing():
    batch = torch.zeros(1, 4, 8), torch.zeros(4)
    assert reader(batch, 4)(batch)[:2] == (None, None)


@pytest.mark.parametrize(
    ("batch", "batch_size"),
    [
        ({"input_ids": IDS}, 4),
        ([torch.zeros(3, 8, 8)] * 5, 5),
        (((torch.zeros(3, 8, 8),) * 5, ({},) * 5), 5),
        ([[IMAGES, IMAGES], ["path"] * 6], 6),
        ([TEXT, TEXT], 4),
    ],
    ids=["tokens", "a list of images", "images and targets", "views", "tokens with the time first"],
)
def test_an_input_whose_size_no_shape_tells_takes_the_place_of_the_shape_before(monkeypatch, batch, batch_size):
    inputs = Inputs()
    monkeypatch.setattr(module, "inputs", inputs)
    reader(IMAGES)(IMAGES)
    measure = reader(batch, batch_size)
    for _ in range(2):
        measure(batch)
    assert [shape for _, shape in inputs.changes] == [(3, 8, 8), None]
