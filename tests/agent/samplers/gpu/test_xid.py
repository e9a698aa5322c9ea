"""Errors of devices: events of the driver."""

from __future__ import annotations

from typing import Any

import pynvml
import pytest
from fake_nvml import FakeGpu, FakeNvml

from perfagent.samplers.gpu.device import Gpu
from perfagent.samplers.gpu.xid import XidEvents


class Losing(FakeNvml):
    """Waits for no event of a set that a lost board is in. sets: the boards of each set that was made."""

    def __init__(self, *gpus: FakeGpu) -> None:
        super().__init__(*gpus)
        self.sets: list[list[FakeGpu]] = []

    def nvmlEventSetCreate(self) -> object:  # noqa: N802 - the library's own name
        self.sets.append([])
        return self.sets[-1]

    def nvmlDeviceRegisterEvents(self, handle: Any, eventTypes: int, eventSet: Any) -> None:  # noqa: N802, N803
        super().nvmlDeviceRegisterEvents(handle, eventTypes, eventSet)
        eventSet.append(handle)

    def nvmlEventSetWait_v2(self, eventSet: Any, timeoutms: int) -> Any:  # noqa: N802, N803
        if any(board.lost for board in eventSet):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return super().nvmlEventSetWait_v2(eventSet, timeoutms)


def polled(events: XidEvents, library: FakeNvml) -> list[tuple[int | None, int]]:
    """Index of the device, if it is known, and the code."""
    boards = [board for board in library.gpus if not board.lost]
    events.watch([Gpu(library, library.gpus.index(board), board) for board in boards])
    return [(gpu and gpu.index, code) for gpu, code in events.poll()]  # type: ignore[misc]


def test_events_name_their_device_and_outlive_a_lost_one() -> None:
    boards = [FakeGpu(uuid="GPU-a"), FakeGpu(uuid="GPU-b")]
    library = Losing(*boards)
    events = XidEvents(library)
    assert polled(events, library) == []
    library.events.extend([(boards[1], 79), (boards[0], 31)])
    assert polled(events, library) == [(1, 79), (0, 31)]
    boards[0].lost = True
    assert polled(events, library) == []
    library.events.append((boards[1], 94))
    assert polled(events, library) == [(1, 94)]
    assert library.sets == [boards, [boards[1]]]


@pytest.mark.parametrize("refused", ["nvmlDeviceRegisterEvents", "nvmlDeviceGetSupportedEventTypes"])
def test_where_events_cannot_be_had_none_is_asked_for(refused: str) -> None:
    library = FakeNvml(board := FakeGpu(unsupported={refused}))
    library.events.append((board, 79))
    assert polled(XidEvents(library), library) == []
