"""Values on their way from a device: how many buffers they hold, and how exact they are."""

from __future__ import annotations

import pytest
import torch
from fake_streams import Devices

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


class OnDevice:
    """A value on a device: what it copies from there is in `numbers`."""

    is_cpu = False
    device = torch.device("xpu", 0)

    def __init__(self, numbers: torch.Tensor) -> None:
        self.numbers, self.dtype = numbers, numbers.dtype

    def detach(self) -> OnDevice:
        return self

    def clone(self, **_: object) -> OnDevice:
        return self

    def numel(self) -> int:
        return self.numbers.numel()

    def is_floating_point(self) -> bool:
        return self.numbers.is_floating_point()

    def reshape(self, *shape: int) -> torch.Tensor:
        return self.numbers.reshape(*shape)


@pytest.fixture
def allocations(devices: Devices, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers that each allocation of pinned memory has room for, as they come. It is pageable memory without a GPU,
    and the device has done all that it was given."""
    made: list[int] = []

    def pinned(self: backends.Backend, size: int, dtype: torch.dtype) -> torch.Tensor:
        made.append(size)
        with torch.inference_mode(mode=False):
            return torch.empty(size, dtype=dtype)

    monkeypatch.setattr(backends.Backend, "pinned", pinned)
    return made


def taken(size: int) -> Reading | None:
    return read_later(OnDevice(torch.arange(float(size))))  # type: ignore[arg-type]


def test_after_a_stall_values_of_any_size_are_taken_again(allocations: list[int]) -> None:
    """Counted once was what had ever been made: a size that came later got nothing for the rest of the run. Small values
    share an allocation, as each waits for the device."""
    waiting = []
    with torch.inference_mode():  # a buffer that is made while a script validates serves its training too
        while (one := taken(1)) is not None:
            waiting.append(one)
    assert len(waiting) > 1000 and set(allocations) == {64}
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
def test_a_value_of_a_device_is_exact(number: float, dtype: torch.dtype, allocations: list[int]) -> None:
    numbers = torch.tensor(number, dtype=dtype)
    value = read_number_later(OnDevice(numbers))  # type: ignore[arg-type]
    assert isinstance(value, Reading)
    assert value_of(value) == numbers.item()


def test_without_pinned_memory_a_copy_on_the_device_is_read(devices: Devices, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends.Backend, "pinned", lambda *_: None)
    reading = taken(3)
    assert reading is not None
    devices.work(1.0)
    assert reading.ready()
    devices.streams[0].done = -1.0
    assert not reading.ready()
    assert reading.values() == [0.0, 1.0, 2.0]


def test_what_lies_on_the_host_is_read_there_and_nothing_on_meta() -> None:
    x = torch.arange(2.0)
    assert is_tensor(x) and not is_tensor(2.0)
    reading = read_later(x)
    assert reading is not None and reading.on_host and reading.values() == [0.0, 1.0]
    assert (read_number_later(x[1]), read_later(torch.ones(2, device="meta"))) == (1.0, None)
    copy, there = duplicate(x)
    assert there is None and copy is not x and fetched(copy).equal(x)


def test_a_kind_without_events_is_read_from_a_private_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OnDevice, "device", torch.device("mps", 0))
    reading = taken(2)
    assert reading is not None and reading.ready()


def test_a_value_of_a_lost_device_is_none() -> None:
    class Lost(torch.Tensor):
        def numel(self) -> int:
            raise torch.AcceleratorError("the device is lost")

    values = {"loss": torch.ones(1).as_subclass(Lost), "lr": 0.1}
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
