from __future__ import annotations

import os
from pathlib import Path

import pytest
from fake_nvml import FakeGpu, FakeNvml

from perfagent.samplers.gpu.device import Gpu
from perfagent.samplers.gpu.xid import KernelLog, XidEvents

NO_LOG = "/nothing/there"


def test_events_are_polled_without_waiting_and_name_their_device() -> None:
    boards = [FakeGpu(uuid="GPU-a"), FakeGpu(uuid="GPU-b")]
    library = FakeNvml(*boards)
    gpus = [Gpu(library, index, board) for index, board in enumerate(boards)]
    events = XidEvents(library, KernelLog(NO_LOG))
    events.watch(gpus)
    events.watch(gpus)
    assert library.registered == boards
    assert events.poll() == []
    library.events.extend([(boards[1], 79), (boards[0], 31)])
    assert [(xid.gpu and xid.gpu.index, xid.code) for xid in events.poll()] == [(1, 79), (0, 31)]
    assert events.poll() == []


def test_a_storm_of_errors_does_not_keep_the_thread() -> None:
    board = FakeGpu()
    library = FakeNvml(board)
    events = XidEvents(library, KernelLog(NO_LOG))
    events.watch([Gpu(library, 0, board)])
    library.events.extend([(board, 13)] * 100)
    assert len(events.poll()) == 16
    assert len(library.events) == 84


def test_the_kernels_log_stands_in_where_events_cannot_be_had(tmp_path: Path) -> None:
    pipe = tmp_path / "kmsg"
    os.mkfifo(pipe)
    writer = os.open(pipe, os.O_RDWR)
    board = FakeGpu(pci="00000000:3B:00.0", unsupported={"nvmlDeviceRegisterEvents"})
    library = FakeNvml(board)
    events = XidEvents(library, KernelLog(str(pipe)))
    events.watch([Gpu(library, 0, board)])
    assert events.poll() == []
    os.write(writer, b"4,917,1234,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, name=python, GPU has fallen off the bus.\n")
    assert [(xid.gpu and xid.gpu.index, xid.code) for xid in events.poll()] == [(0, 79)]
    os.write(writer, b"6,918,1235,-;usb 1-1: new device\n6,919,1236,-;NVRM: Xid (PCI:0000:99:00): 31, Ch 00000008\n")
    assert events.poll() == [(None, 31)]
    os.close(writer)


@pytest.mark.fault
def test_a22_a_log_that_may_not_be_read_is_no_error() -> None:
    log = KernelLog(NO_LOG)
    assert log.poll() == log.poll() == []
