"""Values on their way from a device: how many buffers they hold, and how exact they are."""

from __future__ import annotations

import pytest
import torch
from fake_accelerator import Control

from perfagent.device import (
    Reading,
    backends,
    duplicate,
    fetched,
    is_tensor,
    leak_in_forked_child,
    read_all_later,
    read_later,
    read_number_later,
    value_of,
)

DEVICE = "fakegpu:0"


def taken(size: int) -> Reading | None:
    return read_later(torch.arange(float(size), device=DEVICE))


def test_after_a_stall_values_of_any_size_are_taken_again(fakegpu: Control) -> None:
    """Counted once was what had ever been made: a size that came later got nothing for the rest of the run. Small values
    share an allocation, as each waits for the device."""
    waiting = []
    with fakegpu.held(), torch.inference_mode():  # a buffer made while a script validates serves its training too
        while (one := taken(1)) is not None:
            waiting.append(one)
    assert 1000 < len(waiting) == 64 * fakegpu.counts().pinned
    assert taken(300) is None
    for reading in waiting:
        assert reading.values() == [0.0]
    again = [taken(1) for _ in range(1000)]
    assert all(again)
    reading = taken(300)
    assert reading is not None
    assert reading.values() == [float(number) for number in range(300)]


@pytest.mark.parametrize(
    ("number", "dtype"),
    [
        (16_777_217, torch.int64),
        (2**53 - 1, torch.int64),
        (0.1, torch.float64),
        (True, torch.bool),
        (0.1, torch.bfloat16),
    ],
)
def test_a_value_of_a_device_is_exact(number: float, dtype: torch.dtype, fakegpu: Control) -> None:
    value = read_number_later(torch.tensor(number, dtype=dtype, device=DEVICE))
    assert isinstance(value, Reading)
    assert value_of(value) == torch.tensor(number, dtype=dtype).item()


def test_without_pinned_memory_a_copy_on_the_device_is_read(fakegpu: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends.Backend, "pinned", lambda *_: None)
    with fakegpu.held():
        reading = taken(3)
        assert reading is not None and not reading.ready()
    assert reading.ready()
    assert reading.values() == [0.0, 1.0, 2.0]


def test_what_lies_on_the_host_is_read_there_and_nothing_on_meta() -> None:
    x = torch.arange(2.0)
    assert is_tensor(x) and not is_tensor(2.0)
    reading = read_later(x)
    assert reading is not None and reading.on_host and reading.values() == [0.0, 1.0]
    assert (read_number_later(x[1]), read_later(torch.ones(2, device="meta"))) == (1.0, None)
    copy, there = duplicate(x)
    assert there is None and copy is not x and fetched(copy).equal(x)


@pytest.mark.usefixtures("fakegpu")  # in a process of its own: it has met a device
def test_a_kind_without_events_is_read_from_a_private_copy() -> None:
    class OnMps(torch.Tensor):
        device = torch.device("mps", 0)

    changed = torch.arange(2.0)
    reading = read_later(changed.as_subclass(OnMps))
    changed += 1
    assert reading is not None and reading.ready() and reading.values() == [0.0, 1.0]


def test_a_value_of_a_lost_device_is_none(fakegpu: Control) -> None:
    values = {"loss": torch.ones(1, device=DEVICE), "lr": 0.1}
    fakegpu.lose()
    read_all_later(values)
    assert values == {"loss": None, "lr": 0.1}


def test_what_leaks_in_a_forked_child_is_never_destroyed() -> None:
    """The last reference to an event would end the child."""
    destroyed: list[str] = []

    class Held:
        def __del__(self) -> None:
            destroyed.append("held")

    leak_in_forked_child(Held())
    assert not destroyed
