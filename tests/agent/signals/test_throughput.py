"""Samples and tokens of a batch, from its shape."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from types import SimpleNamespace

import pytest
import torch

from perfagent.signals.throughput import reader, size_of

Pair = namedtuple("Pair", "x y")
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
    "a list of dicts": ([{"x": 1}, {"x": 2}, {"x": 3}], (3, None)),
    "detection": (([torch.zeros(3, 5, 5), torch.zeros(3, 7, 7)], [{}, {}]), (2, None)),
    "packed into one row": ({"input_ids": torch.zeros(100, dtype=torch.long), "cu_seqlens": torch.zeros(4)}, (None, 100)),
    "a packed sequence": (torch.nn.utils.rnn.pack_sequence([torch.zeros(5, 2), torch.zeros(3, 2)]), (2, None)),
    "graphs": (SimpleNamespace(num_graphs=9), (9, None)),
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


def test_a_cheap_reader_follows_the_batch():
    measure = reader({"input_ids": IDS})
    assert measure({"input_ids": IDS[:3, :10]})[:2] == (3, 30)
    assert measure((IMAGES, torch.zeros(6)))[:2] == (6, None), "another kind of batch is measured afresh"
