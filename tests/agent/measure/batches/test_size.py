"""Samples and tokens of a batch, from its shape; and when the shape of the model's input changed."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from perfagent.measure.batches.size import inputs, reader, size_of
from perfagent.step.state import state

Pair = namedtuple("Pair", "x y")


@dataclass(slots=True)
class Images:
    pixels: torch.Tensor
    labels: torch.Tensor


IDS = torch.zeros(4, 16, dtype=torch.long)
IMAGES, PICTURE = torch.zeros(6, 3, 8, 8), torch.zeros(3, 8, 8)
SPEECH, TEXT = torch.zeros(20, 4, 8), torch.zeros(20, 4, dtype=torch.long)
PACKED, ROW = torch.zeros(100, dtype=torch.long), torch.zeros(1, 4, 8)

BATCHES = {
    "images and labels": ((IMAGES, torch.zeros(6, dtype=torch.long)), (6, None)),
    "a tensor": (IMAGES, (6, None)),
    "token ids": ({"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}, (4, 64)),
    "two matrices of tokens": ((IDS, IDS), (4, 64)),
    "a dataclass": (Images(IMAGES, torch.zeros(6)), (6, None)),
    "an object with tokens": (SimpleNamespace(input_ids=IDS, attention_mask=None), (4, 64)),
    "a list of dicts": ([{"x": 1}, {"x": 2}, {"x": 3}], (3, None)),
    "a list of one dict": ([{"x": 1}], (1, None)),
    "a tuple of one dict": (({"input_ids": IDS},), (4, 64)),
    "detection": (([torch.zeros(3, 5, 5), torch.zeros(3, 7, 7)], [{}, {}]), (2, None)),
    "packed into one row": ({"input_ids": PACKED, "cu_seqlens": torch.zeros(4)}, (None, 100)),
    "a packed sequence": (torch.nn.utils.rnn.pack_sequence([torch.zeros(5, 2), torch.zeros(3, 2)]), (2, None)),
    "graphs": (SimpleNamespace(num_graphs=9), (9, None)),
    "token ids in a mapping in a mapping": ({"inputs": {"input_ids": IDS}, "labels": torch.zeros(4)}, (4, 64)),
    "detection with labels": (([torch.zeros(3, 5, 5), torch.zeros(3, 7, 7)], torch.zeros(2)), (2, None)),
    "pairs of texts": ({"anchor_input_ids": IDS, "positive_input_ids": IDS[:, :9], "label": torch.zeros(4)}, (4, 100)),
    "texts of several rows": ({"query_input_ids": IDS, "passage_input_ids": IDS[:2]}, (None, None)),
    "numbers that are no tokens": (torch.zeros(4, 16), (4, None)),
    "a scalar": (torch.tensor(1.0), (None, None)),
    "no agreement": ([torch.zeros(2, 2), torch.zeros(3, 2)], (None, None)),
}


@pytest.mark.parametrize("name", BATCHES)
def test_size_of_a_batch(name):
    batch, expected = BATCHES[name]
    assert size_of(batch)[:2] == expected
    assert reader(batch)(batch)[:2] == expected, "the cheap reader says something else"


class Raises:
    def __init__(self):
        self.x = IMAGES

    @property
    def num_graphs(self):
        raise RuntimeError("the script's own")

    def __getattr__(self, name):
        raise RuntimeError(f"the script's own: {name}")


def nodes(count):
    return SimpleNamespace(points=torch.zeros(count, 3))


def of_pairs(rows):
    return [{"image": IMAGES[:rows]}, {"label": torch.zeros(rows), "path": ["a"] * rows}]


def of_tokens(rows):
    return {"input_ids": IDS[:1].expand(rows, 16)}


LATER = {
    # first batch, the loader's batch size, and later batches with their sizes
    "views without labels": ([[IMAGES, IMAGES], ["path"] * 6], 6, [([[IMAGES[:2], IMAGES[:2]], ["path"] * 2], (2, None))]),
    "an object": (
        Images(IMAGES, torch.zeros(6)), 6,
        [(Images(IMAGES[:2], torch.zeros(2)), (2, None)), (SimpleNamespace(x=IMAGES), (6, None)),
         ((IMAGES, torch.zeros(6)), (6, None))],
    ),
    "an object that raises": (Raises(), 6, [(Raises(), (6, None))]),
    "rows that are points": (nodes(5), 8, [(nodes(100), (None, None))]),
    "tokens": (
        {"input_ids": IDS}, None,
        [({"input_ids": IDS[:3, :10]}, (3, 30)), ((IMAGES, torch.zeros(6)), (6, None)),
         ({"x": torch.zeros(5, 12)}, (5, None)), ({"input_ids": PACKED}, (None, 100))],
    ),
    "several texts": (
        {"anchor_input_ids": IDS, "positive_input_ids": IDS, "anchor_modality": "text"}, None,
        [({"anchor_input_ids": IDS[:3], "positive_input_ids": IDS[:3, :5], "anchor_modality": "text"}, (3, 63)),
         ({"anchor_input_ids": IDS[:3], "positive_input_ids": IDS[:3], "negative_input_ids": IDS[:3]}, (3, 144)),
         ({"text_input_ids": IDS[:2]}, (2, 32)), ({"x": torch.zeros(5, 12)}, (5, None))],
    ),
    "torchvision's images and targets": (((PICTURE,) * 5, ({},) * 5), 5, [(((PICTURE,) * 2, ({},) * 2), (2, None))]),
    "a list of one tensor": ([IMAGES], 1, [([IMAGES[:4]], (4, None))]),
    "a list of images": ([PICTURE] * 5, 5, [([PICTURE] * 2, (2, None)), ((IMAGES, torch.zeros(6)), (6, None))]),
    "a list of pairs": ([(PICTURE, 1)] * 5, 5, [([(PICTURE, 1)] * 3, (3, None))]),
    "inputs and targets": (of_pairs(6), 6, [(of_pairs(4), (4, None)), ((IMAGES[:3], torch.zeros(3)), (3, None))]),
    "tokens and targets": ((of_tokens(6), {"y": torch.zeros(6)}), 6, [((of_tokens(4), {"y": torch.zeros(4)}), (4, 64))]),
    "speech and targets": ((SPEECH, torch.zeros(4, 5)), 4, [((SPEECH[:9, :3], torch.zeros(3, 5)), (3, None))]),
    "tokens with the time first": ([TEXT, TEXT], 4, [([TEXT[:7], TEXT[:7]], (4, 28))]),
    "without that tensor": (
        [IMAGES, torch.zeros(6)], None,
        [([], (None, None)), (["a", torch.zeros(6)], (6, None)), ([torch.tensor(1.0), torch.zeros(6)], (6, None))],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LATER)
def test_a_reader_follows_the_batches_of_its_loader(name):
    first, batch_size, batches = LATER[name]
    measure = reader(first, batch_size)
    assert [measure(batch)[:2] for batch, _ in batches] == [expected for _, expected in batches]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_nested_tensors_have_no_size(layout):
    nested = torch.nested.nested_tensor([torch.zeros(length, dtype=torch.long) for length in (5, 3, 9)], layout=layout)
    for batch in (nested, {"input_ids": nested}, (nested, nested)):
        assert size_of(batch)[:2] == reader(batch)(batch)[:2] == (None, None)


# ---- the shape of the input


def noted(batches, batch_size=None):
    """The changes that a loader's reader notes, one batch a step."""
    inputs.changes.clear()
    inputs.latest = IMAGES.shape  # of an evaluation before
    measure = reader(batches[0], batch_size)
    for state.current.completed, batch in enumerate(batches):
        measure(batch)
    return [*inputs.changes]


def images(*sides):
    return [(torch.zeros(6, 3, side, side), torch.zeros(6)) for side in sides]


SPOKEN = [(SPEECH[:length, :samples], torch.zeros(samples, 5)) for length, samples in ((20, 4), (20, 4), (9, 4))]
WAVES = [{"labels": torch.zeros(8), "input_values": torch.zeros(8, length)} for length in (1000, 16000)]
OBJECTS = [Images(IMAGES, torch.zeros(6)), Images(IMAGES[..., :4], torch.zeros(6))]
SHAPES = {
    "noted when it changes": (images(8, 8, 8, 16, 16), None, [(0, (3, 8, 8)), (3, (3, 16, 16))]),
    "in an object": (OBJECTS, None, [(0, (3, 8, 8)), (1, (3, 8, 4))]),
    "the largest tensor": (WAVES, None, [(0, (1000,)), (1, (16000,))]),
    "with the time first": (SPOKEN, 4, [(0, (20, 8)), (2, (9, 8))]),
    "tokens say enough": ([IDS, IDS[:, :7], IDS[:, :3]], None, [(0, None)]),
    "graphs": ([SimpleNamespace(num_graphs=9)] * 2, None, [(0, None)]),
    "detection": ([([torch.zeros(3, 5, 5), torch.zeros(3, 7, 7)], [{}, {}])], None, [(0, None)]),
    "points": ([{"labels": torch.zeros(4), "points": torch.zeros(100, 3)}], None, [(0, None)]),
    "an object of nodes": ([(SimpleNamespace(nodes=torch.zeros(50, 3)), torch.zeros(4))], None, [(0, None)]),
    "tokens with the time first": ([[TEXT, TEXT]], 4, [(0, None)]),
}


@pytest.mark.parametrize("name", SHAPES)
def test_the_shape_of_the_input_is_noted_when_it_changes(record, name):
    record()
    batches, batch_size, changes = SHAPES[name]
    assert noted(batches, batch_size) == changes


def test_what_nobody_takes_stays_bounded(record):
    record()
    assert len(noted([[torch.empty(2, length), torch.empty(2)] for length in range(1, 3000)])) == 1024
