"""Errors of devices: events of the driver, and the kernel's log where there are none."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_nvml import FakeGpu, FakeNvml

from perfagent.samplers.gpu.device import Gpu
from perfagent.samplers.gpu.xid import KernelLog, XidEvents

NO_LOG = "/nothing/there"
NO_EVENTS = {"nvmlDeviceRegisterEvents"}


def watching(library: FakeNvml, log: str = NO_LOG) -> XidEvents:
    events = XidEvents(library, KernelLog(log))
    for _ in range(2):
        events.watch([Gpu(library, index, board) for index, board in enumerate(library.gpus)])
    return events


def told(events: XidEvents) -> list[tuple[int | None, int]]:
    """Index of the device, if it is known, and the code."""
    return [(gpu and gpu.index, code) for gpu, code in events.poll()]  # type: ignore[misc]


class Kernel:
    """A log that is written by hand."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path, self._writer = str(path), os.open(path, os.O_RDWR)

    def write(self, *lines: str) -> None:
        os.write(self._writer, "".join(f"{line}\n" for line in lines).encode())

    def close(self) -> None:
        os.close(self._writer)


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[Kernel]:
    made = Kernel(tmp_path / "kmsg")
    yield made
    made.close()


def test_events_are_polled_without_waiting_and_name_their_device() -> None:
    boards = [FakeGpu(uuid="GPU-a"), FakeGpu(uuid="GPU-b")]
    library = FakeNvml(*boards)
    events = watching(library)
    assert library.registered == boards
    assert told(events) == []
    library.events.extend([(boards[1], 79), (boards[0], 31)])
    assert told(events) == [(1, 79), (0, 31)]
    assert told(events) == []


def test_the_kernels_log_stands_in_where_events_cannot_be_had(kernel: Kernel) -> None:
    boards = [
        FakeGpu(uuid=f"GPU-{pci}", pci=pci, unsupported=NO_EVENTS)
        for pci in ("00000000:3B:00.0", "00010000:01:00.0", "00000000:01:00.0")  # two behind different bridges
    ]
    events = watching(FakeNvml(*boards), kernel.path)
    assert told(events) == []
    kernel.write("4,917,1234,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, name=python, GPU has fallen off the bus.")
    assert told(events) == [(0, 79)]
    kernel.write(
        "6,918,1235,-;usb 1-1: new device",
        "6,919,1236,-;NVRM: Xid (PCI:0000:99:00): 31, Ch 00000008",
        "NVRM: Xid (PCI:0000:01:00): 31, pid=1",
        "NVRM: Xid (PCI:10000:01:00): 79",
        "NVRM: Xid (0000:01:00): 13, Ch 00000008",  # as older drivers write it
    )
    assert told(events) == [(None, 31), (2, 31), (1, 79), (2, 13)]
