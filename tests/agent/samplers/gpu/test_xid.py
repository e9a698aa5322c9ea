from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

import pynvml
import pytest
from fake_nvml import FakeGpu, FakeNvml

from perfagent.samplers.gpu.device import Gpu
from perfagent.samplers.gpu.xid import KernelLog, XidEvents, _address

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
    os.write(
        writer, b"4,917,1234,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, name=python, GPU has fallen off the bus.\n"
    )
    assert [(xid.gpu and xid.gpu.index, xid.code) for xid in events.poll()] == [(0, 79)]
    os.write(writer, b"6,918,1235,-;usb 1-1: new device\n6,919,1236,-;NVRM: Xid (PCI:0000:99:00): 31, Ch 00000008\n")
    assert events.poll() == [(None, 31)]
    os.close(writer)


def test_the_kernels_log_stands_in_once_a_lost_gpu_ends_all_events(tmp_path: Path) -> None:
    class Ended(FakeNvml):
        ended = False

        def nvmlEventSetWait_v2(self, eventSet: Any, timeoutms: int) -> Any:  # noqa: N802, N803 - the library's own names
            if self.ended:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
            return super().nvmlEventSetWait_v2(eventSet, timeoutms)

    pipe = tmp_path / "kmsg"
    os.mkfifo(pipe)
    writer = os.open(pipe, os.O_RDWR)
    board = FakeGpu(pci="00000000:3B:00.0")
    library = Ended(board)
    events = XidEvents(library, KernelLog(str(pipe)))
    events.watch([Gpu(library, 0, board)])
    line = b"4,917,1234,-;NVRM: Xid (PCI:0000:3b:00): %d, pid=1234\n"
    assert events.poll() == []
    library.events.append((board, 31))
    os.write(writer, line % 31)
    assert [xid.code for xid in events.poll()] == [31]  # once, though both tell it
    library.ended = True
    os.write(writer, line % 79)
    assert [(xid.gpu and xid.gpu.index, xid.code) for xid in events.poll()] == [(0, 79)]
    os.write(writer, line % 45)
    assert [xid.code for xid in events.poll()] == [45]
    os.close(writer)


def test_a_device_is_known_by_where_its_handle_points() -> None:
    places = (ctypes.c_longlong * 2)(1, 2)  # the structures are of no size: as NVML's own, these lie somewhere
    handle = lambda n: ctypes.cast(ctypes.byref(places, 8 * n), pynvml.c_nvmlDevice_t)  # noqa: E731
    assert _address(handle(0)) == _address(handle(0)) != _address(handle(1))
    assert _address(pynvml.c_nvmlDevice_t()) != _address(handle(0))


def test_a_log_that_nobody_holds_is_closed() -> None:
    log = KernelLog("/dev/null")
    log.poll()
    assert log._file is not None
    fd = log._file.fd
    assert os.fstat(fd)
    del log
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_boards_behind_another_bridge_are_told_apart(tmp_path: Path) -> None:
    log = tmp_path / "kmsg"
    log.write_bytes(b"")
    boards = [FakeGpu(uuid="GPU-a", pci="00010000:01:00.0"), FakeGpu(uuid="GPU-b", pci="00000000:01:00.0")]
    library = FakeNvml(*boards)
    events = XidEvents(library, KernelLog(str(log)))
    for index, board in enumerate(boards):
        board.unsupported = {"nvmlDeviceRegisterEvents"}
        events.watch([Gpu(library, index, board)])
    assert events.poll() == []
    with log.open("ab") as kernel:
        kernel.write(b"NVRM: Xid (PCI:0000:01:00): 31, pid=1\nNVRM: Xid (PCI:10000:01:00): 79\n")
        kernel.write(b"NVRM: Xid (0000:01:00): 13, Ch 00000008\n")  # as older drivers write it
    assert [(xid.gpu and xid.gpu.index, xid.code) for xid in events.poll()] == [(1, 31), (0, 79), (1, 13)]


@pytest.mark.fault
def test_a22_a_driver_that_gives_no_set_of_events_is_no_error() -> None:
    class Without(FakeNvml):
        def nvmlEventSetCreate(self) -> object:  # noqa: N802 - the library's own name
            raise pynvml.NVMLError(pynvml.NVML_ERROR_RESET_REQUIRED)

    board = FakeGpu()
    library = Without(board)
    events = XidEvents(library, KernelLog(NO_LOG))
    events.watch([Gpu(library, 0, board)])
    assert events.poll() == []


@pytest.mark.fault
def test_a22_a_log_that_may_not_be_read_is_no_error() -> None:
    log = KernelLog(NO_LOG)
    assert log.poll() == log.poll() == []
