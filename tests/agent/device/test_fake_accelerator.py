"""The devices that the other tests of this folder train on: what a script and a test see of them."""

from __future__ import annotations

import threading

import pytest
import torch
from fake_accelerator import Control

DEVICE = "fakegpu:0"


def pinned(size: int) -> torch.Tensor:
    return torch.zeros(size, pin_memory=True)


def recorded(stream: torch.Stream | None = None) -> torch.Event:
    event = torch.fakegpu.Event(enable_timing=True)
    event.record(stream)
    return event


def test_a_held_device_reaches_no_event_until_it_is_let_go(fakegpu: Control) -> None:
    before = recorded()
    fakegpu.hold()
    after = recorded()
    assert before.query() and not after.query() and not torch.fakegpu.current_stream().query()
    fakegpu.let_go()
    assert after.query() and torch.fakegpu.current_stream().query()


def test_a_copy_to_pinned_memory_arrives_with_the_next_event(fakegpu: Control) -> None:
    value, there = torch.arange(4.0, device=DEVICE), pinned(4)
    with fakegpu.held():
        there.copy_(value, non_blocking=True)
        event = recorded()
        value += 10.0  # behind the copy in the stream
        assert not event.query() and there.isnan().all()
    assert event.query() and there.tolist() == [0, 1, 2, 3]


def test_times_are_those_of_the_device(fakegpu: Control) -> None:
    fakegpu.set_clock(100.0)
    begin = recorded()
    fakegpu.work(0.25)
    end = recorded()
    with torch.fakegpu.stream(torch.fakegpu.Stream()):
        elsewhere = recorded()
    assert begin.elapsed_time(end) == 250.0
    assert begin.elapsed_time(elsewhere) == 0.0
    fakegpu.set_clock(103.0)
    assert end.elapsed_time(recorded()) == 2750.0


def test_memory_is_counted_and_has_an_end(fakegpu: Control) -> None:
    fakegpu.set_memory(64 << 20)
    kept = torch.zeros(4 << 20, device=DEVICE)  # 16 MiB
    made = kept + 1
    assert torch.accelerator.memory_allocated() == torch.fakegpu.memory_allocated(0) == 32 << 20
    assert torch.accelerator.get_memory_info() == (32 << 20, 64 << 20)
    del made
    assert torch.accelerator.memory_allocated() == 16 << 20
    assert torch.accelerator.max_memory_allocated() == torch.accelerator.memory_reserved() == 32 << 20
    assert torch.accelerator.memory_allocated(1) == 0
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 60.00 MiB"):
        torch.zeros(15 << 20, device=DEVICE)
    stats = torch.accelerator.memory_stats()
    assert (stats["num_ooms"], stats["num_alloc_retries"]) == (1, 1)
    assert torch.accelerator.memory_reserved() == 16 << 20


def test_reads_copies_and_waits_are_counted_by_thread(fakegpu: Control) -> None:
    value = torch.ones(3, device=DEVICE)
    fakegpu.forget_counts()

    def read() -> None:
        assert value.sum().item() == 3.0

    reader = threading.Thread(target=read)
    reader.start()
    native = reader.native_id
    reader.join()
    pinned(3).copy_(value, non_blocking=True)
    there = value.cpu()
    value.copy_(there)
    torch.accelerator.synchronize()
    counts = fakegpu.by_thread()
    other, mine = counts[native], counts[threading.get_native_id()]
    assert (other.scalar_reads, other.waits, other.copies_to_host) == (1, 1, 0)
    assert (mine.scalar_reads, mine.copies_to_host, mine.copies_to_device, mine.synchronizations) == (0, 2, 1, 1)
    assert mine.waits == 3
    assert fakegpu.counts(without={native}) == mine


def test_a_graph_runs_its_kernels_at_each_replay_only(fakegpu: Control) -> None:
    weight, given = torch.ones(2, device=DEVICE), torch.ones(2, device=DEVICE)
    graph = torch.accelerator.Graph()
    with torch.fakegpu.Stream(), graph:
        assert torch.fakegpu.is_current_stream_capturing()
        result = given * 2
        weight += result
    assert not torch.fakegpu.is_current_stream_capturing()
    assert weight.tolist() == [1, 1]
    for number in (1.0, 5.0):
        given.fill_(number)
        graph.replay()
    assert result.tolist() == [10, 10] and weight.tolist() == [13, 13]


@pytest.mark.parametrize("from_another_thread", [False, True])
def test_a_query_while_a_graph_is_captured_ends_the_capture(fakegpu: Control, from_another_thread: bool) -> None:
    event, told = recorded(), []

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
