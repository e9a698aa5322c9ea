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
