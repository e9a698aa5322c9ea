"""Values on their way from a device: how many buffers they hold, who asks for them, and what becomes of them in a
fork."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from perfagent import device


def allocations(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers that each allocation of pinned memory has room for, as they come. It is pageable memory without a GPU."""
    made: list[int] = []
    original = device._buffer

    def buffer(size: int, dtype: torch.dtype, *, pinned: bool) -> torch.Tensor:
        made.append(size)
        return original(size, dtype, pinned=not pinned)

    monkeypatch.setattr(device, "_buffer", buffer)
    return made


class OnCuda:
    """A value on a device: what it copies from there is in `numbers`."""

    is_cpu = False
    device = torch.device("cuda", 0)

    def __init__(self, numbers: torch.Tensor) -> None:
        self.numbers, self.dtype = numbers, numbers.dtype

    def detach(self) -> OnCuda:
        return self

    def numel(self) -> int:
        return self.numbers.numel()

    def is_floating_point(self) -> bool:
        return self.numbers.is_floating_point()

    def reshape(self, *shape: int) -> torch.Tensor:
        return self.numbers.reshape(*shape)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Stands for a driver that has done all it was given. Holds the numbers that each allocation of pinned memory has
    room for."""
    made = allocations(monkeypatch)
    for name in ("_pools", "_streams"):
        monkeypatch.setattr(device, name, {})
    for name in ("_on_their_way", "_elsewhere", "_device"):
        monkeypatch.setattr(device, name, getattr(device, name))
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda stream: None, query=lambda: True))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.delattr(torch._C, "_cuda_getCurrentStream", raising=False)
    return made


def taken(size: int) -> device.Reading | None:
    return device.collect(OnCuda(torch.arange(float(size))))  # type: ignore[arg-type]


def test_after_a_stall_values_of_any_size_are_taken_again(cuda: list[int]) -> None:
    """Counted once was what had ever been made: a size that came later got nothing for the rest of the run. Small values
    share an allocation, as each waits for the device."""
    waiting = []
    with torch.inference_mode():  # a buffer that is made while a script validates serves its training too
        while (one := taken(1)) is not None:
            waiting.append(one)
    assert len(waiting) > 1000 and set(cuda) == {64}
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
def test_a_value_of_a_device_is_exact(number: float, dtype: torch.dtype, cuda: list[int]) -> None:
    numbers = torch.tensor(number, dtype=dtype)
    value = device.take(OnCuda(numbers))  # type: ignore[arg-type]
    assert isinstance(value, device.Reading)
    assert device.value_of(value) == numbers.item()


FORKS = """
import os, sys, torch
from perfagent import device

class Event:
    def __del__(self):
        os.write(1, b"freed " if os.getpid() == parent else b"freed by the child ")

parent = os.getpid()
device._uses(torch.device("cuda", 0))
device._pools[1] = [Event()]
held = [Event()]
child = os.fork()
if not child:
    device.immortal(held)
    held = None
    sys.exit(3)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.mark.real
def test_a_forked_child_frees_no_event_not_even_when_it_ends() -> None:
    done = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, check=False)
    assert done.stdout.startswith("3\nfreed"), done.stdout + done.stderr
    assert "child" not in done.stdout
