"""Values on their way from a device: how many buffers they hold."""

from __future__ import annotations

import torch

from perfagent import device


def on_its_way(pool: list) -> device.Reading:
    device._made += 1
    return device.Reading(torch.tensor([2.5]), None, pool)


def test_a_value_that_is_read_leaves_its_buffer_for_the_next() -> None:
    made, pool = device._made, []
    reading = on_its_way(pool)
    assert reading.values() == [2.5]
    del reading
    assert (device._made, len(pool)) == (made + 1, 1)
    device._made = made


def test_a_value_that_nobody_reads_no_longer_counts_as_waiting() -> None:
    """So many as may wait are all that there ever are: after that, values would be dropped for good."""
    made, pool = device._made, []
    reading = on_its_way(pool)
    del reading
    assert (device._made, pool) == (made, [])


def test_a_buffer_that_is_made_while_a_script_validates_serves_its_training_too() -> None:
    """torch refuses to write to what was made in inference mode; on a GPU each value that came later would have been lost."""
    with torch.inference_mode():
        buffer = device._buffer(1, torch.float32, pinned=False)
        buffer.copy_(torch.ones(1))
    buffer.copy_(torch.full((1,), 2.5))
    assert buffer.tolist() == [2.5]
