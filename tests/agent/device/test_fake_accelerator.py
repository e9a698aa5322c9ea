"""The devices that the other tests of this folder train on: what a script and a test see of them."""

from __future__ import annotations

import threading

import pytest
import torch
from fake_accelerator import Control

DEVICE = "fakegpu:0"


def test_reads_copies_and_waits_are_counted_by_thread(fakegpu: Control) -> None:
    value = torch.ones(3, device=DEVICE)
    fakegpu.forget_counts()

    def read() -> None:
        assert value.sum().item() == 3.0

    reader = threading.Thread(target=read)
    reader.start()
    native = reader.native_id
    reader.join()
    torch.zeros(3, pin_memory=True).copy_(value, non_blocking=True)
    there = value.cpu()
    value.copy_(there)
    torch.accelerator.synchronize()
    counts = fakegpu.by_thread()
    other, mine = counts[native], counts[threading.get_native_id()]
    assert (other.scalar_reads, other.waits, other.copies_to_host) == (1, 1, 0)
    assert (mine.scalar_reads, mine.copies_to_host, mine.copies_to_device, mine.synchronizations) == (0, 2, 1, 1)
    assert mine.waits == 3
    assert fakegpu.counts(without={native}) == mine


@pytest.mark.parametrize("from_another_thread", [False, True])
def test_a_query_while_a_graph_is_captured_ends_the_capture(fakegpu: Control, from_another_thread: bool) -> None:
    event, told = torch.fakegpu.Event(), []
    event.record()

    def ask() -> None:
        try:
            event.query()
        except torch.AcceleratorError as error:
            told.append(error)

    graph = torch.accelerator.Graph()
    with pytest.raises(torch.AcceleratorError, match="previous error"), torch.fakegpu.Stream(), graph:
        if from_another_thread:
            asking = threading.Thread(target=ask)
            asking.start()
            asking.join()
        else:
            ask()
    assert len(told) == 1
    assert event.query()
